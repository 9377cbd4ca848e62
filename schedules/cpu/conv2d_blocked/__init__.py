"""Convolutions of blocked channels.

`conv2d_blocked.py`, `depthwise.py` and `separable.py` are rules; `read.py` recognises the function,
`plan.py` chooses tiles, `task.py` writes the micro-kernel, `groups.py` and `narrow_groups.py` are for
convolutions in groups.
"""
