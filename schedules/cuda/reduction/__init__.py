"""Sums, extrema, norms and softmax over some axes; `long_reductions.py` gives each result a block."""
