"""Open dimensions: sizes that are known when a run begins, and no earlier.

A network is compiled for the largest sizes of a bucket. `opening.py` says which axes of which inputs are
open. What constants and extents depend on them shows at a few smaller sizes: `replay.py` tells what the
network is there, or `compare.py` matches it with itself, folded there. `follow.py` makes the inputs padded
values, with counts that a session feeds; from there on `hybridc/frontend/counted/` says what may become of
them.
"""
