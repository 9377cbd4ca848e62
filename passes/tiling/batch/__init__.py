"""Training steps in micro-batches.

`split_batch.py` is the way in; `functions.py` reads where the samples lie in a function, `network.py` which
kernels run once a micro-batch, `statistics.py` adds up sums over the batch.
"""
