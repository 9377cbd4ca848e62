"""Stages `attention`, `fuse` and `separable`: which operators are one kernel.

`fuse.py` groups operators; `attention.py` and `separable.py` join what a CPU alone computes faster together.
"""
