"""Pooling, and its gradients.

`pooling.py` and `max_indices.py` are rules, `read.py` recognises windows.
"""
