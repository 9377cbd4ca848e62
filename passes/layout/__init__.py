"""Stage `layout`: channels in blocks of one vector, where a CPU runs alone.

`layout.py` is the stage, `state.py` what it knows of each tensor; the others say how operators, weights and
functions of training steps compute on blocked tensors.
"""
