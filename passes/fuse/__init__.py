"""Stages `attention`, `fuse` and `separable`: which operators are one kernel.

`fuse.py` groups operators; `attention.py` and `separable.py` join operators that are faster as one kernel on
a CPU without a GPU, and `heads.py` products that are faster as one on a GPU.
"""
