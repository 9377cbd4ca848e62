"""Products on tensor cores, of floats with float32 sums and of bytes with int32 sums.

`tensor_core.py` has the rules. `read.py` finds a product, `packing.py` lays out its weights, `operands.py`
says how threads load it: as `staging.py`, or element by element as `gathered.py`. `kernel.py` writes the
loops, `results.py` what becomes of sums.
"""
