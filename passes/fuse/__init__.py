"""Stages `attention`, `fuse` and `separable`: which operators are one kernel.

`fuse.py` groups operators; `attention.py` and `separable.py` join operators that are faster as one kernel on
a CPU without a GPU; `working_set.py` estimates the bytes of the groups that `fuse` will form.
"""
