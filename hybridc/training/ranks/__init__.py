"""Data-parallel training: several processes, the ranks of an MPI job, that share the parts of every batch.

exchange.py    messages between ranks, each of which must come in time
allreduce.py   sums of arrays over the ranks, in a fixed order
measure.py     how fast messages between ranks are
agreement.py   ranks that must have the same step, data and options
"""
