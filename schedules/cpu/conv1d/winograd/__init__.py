"""Convolutions along one axis by Winograd's minimal filtering.

`bilinear.py` has the algorithms of any stride and dilation, `plan.py` tiles and costs, `winograd_conv1d.py`
the rule.
"""
