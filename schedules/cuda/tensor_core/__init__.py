"""Products of 16-bit floats on tensor cores, with float32 sums; `tensor_core.py` has the rules."""
