"""Kernels of networks with open dimensions that leave out what is padding in a run.

`elements.py` says which elements of a tensor are padding, `intervals.py` bounds an index by what loops run
over, and `skip.py` puts conditions into scheduled functions.
"""
