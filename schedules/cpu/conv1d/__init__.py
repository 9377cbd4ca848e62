"""Convolutions along one axis.

`conv1d.py` is the rule of direct sums, `plan.py` its choice of tiles; `fourier/` computes long filters by
FFT, `winograd/` short ones with fewer multiplications.
"""
