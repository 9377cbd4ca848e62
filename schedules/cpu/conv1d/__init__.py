"""Convolutions along one axis.

`conv1d.py` is the rule of direct sums, `plan.py` its choice of tiles, `blocks.py` its tasks; `fourier/`
computes long filters by FFT, `winograd/` short ones with fewer multiplications.
"""
