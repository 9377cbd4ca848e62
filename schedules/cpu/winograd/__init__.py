"""Winograd's algorithm for 3x3 convolutions of blocked channels.

`winograd.py` is the rule, `stages.py` its three loops, `weights.py` transforms weights known at run time,
`toom_cook.py` makes the matrices.
"""
