"""Convolutions of plain layouts (NCHW), and depthwise ones.

`conv2d.py` and `depthwise.py` are rules, `read.py` recognises the function.
"""
