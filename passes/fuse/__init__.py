"""Stages `attention`, `fuse` and `separable`: which operators are one kernel.

`fuse.py` groups operators; `attention.py` and `separable.py` join what a CPU alone computes faster together;
`working_set.py` estimates the bytes of the groups that `fuse` will form.
"""
