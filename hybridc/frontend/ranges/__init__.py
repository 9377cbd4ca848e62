"""Open dimensions: sizes that are known when a run begins, and no earlier.

A network is compiled for the largest sizes of a bucket. `opening.py` says which axes of which inputs are
open, `compare.py` matches the network with itself, folded at a few smaller sizes, which shows what constants
and extents depend on them, `follow.py` makes the inputs padded values, with counts that a session feeds; from
there on `hybridc/frontend/counted/` says what may become of them.
"""
