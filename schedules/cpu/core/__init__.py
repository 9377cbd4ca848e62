"""What all CPU rules are built from.

`nest.py` reads functions, `micro_kernel.py` writes loops and vectors, `register_tile.py` keeps sums in
registers; `lanewise.py`, `shuffles.py` and `dot_products.py` are LLVM functions on vectors.
"""
