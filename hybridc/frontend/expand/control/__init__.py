"""Loops, scans and sequences of which the model says how often and how many: they become what they compute.

A branch whose condition is known is inlined by the folding pass itself; its nodes, and those that are made
here, are visited next, so that what a trip computes may decide whether there is another one.
What only a run decides is computed either way, and chosen from then (`choices.py`).
"""
