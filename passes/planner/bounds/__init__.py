"""Proofs of how fast a plan can be at most, and how few bytes it can need.

`bound.py` is the way in, `relaxation.py` a linear programme that `linear.py` solves, with
the choices of `segments.py`; `exact.py` the optimum
of small graphs by CP-SAT in a process of its own; `chain/` is a tighter bound for chains of kernels.
"""
