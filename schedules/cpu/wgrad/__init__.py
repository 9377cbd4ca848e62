"""Gradients of convolutions with respect to their weights.

`conv.py`, `conv1d.py` and `fourier.py` are rules, each with its plan; `read.py` recognises the function,
`operands.py` packs.
"""
