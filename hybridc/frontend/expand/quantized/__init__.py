"""Operators on quantised tensors: `quantization.py` has what the others share."""
