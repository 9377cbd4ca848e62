"""Stage `lower`: plans as Relax VM functions, one for each lane.

`lower.py` writes the functions, `bind.py` says which bytes of the arenas each operand of a step is.
"""
