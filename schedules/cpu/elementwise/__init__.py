"""Functions whose every element is computed by itself: arithmetic, transposition, slices, upsampling.

`elementwise.py` is the rule; `index_maps.py` reads affine indices, `loops.py` orders the loops,
`transpose.py` and `upsample.py` use shuffles.
"""
