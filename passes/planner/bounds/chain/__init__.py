"""A bound for networks that are a chain: a dynamic programme over every kernel whole on one device.

`chain.py` is the way in; `stages.py` are the states, `sweep.py` the programme, `frontier.py` its cells.
"""
