"""Stage `tile`: kernels that need more memory than there is become several.

`tile.py` is the stage: it computes `regions.py` of the network tile by tile, by the rules of
`slice_rules.py`. `tile_sizes.py` chooses the sizes within `limits.py`, `concat_slices.py` is the kernel that
reads a halo, `batch/` splits training steps into micro-batches.
"""
