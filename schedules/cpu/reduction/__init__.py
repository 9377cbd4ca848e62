"""Sums, extrema, norms and softmax over some axes.

`reduction.py`, `softmax.py` and `arg_extremum.py` are rules; `read.py` recognises the function,
`contiguous.py` and `vectors.py` reduce contiguous axes, the `strided` files any other.
"""
