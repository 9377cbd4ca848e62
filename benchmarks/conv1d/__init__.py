"""The engines of `benchmarks/conv1d.py`, each a process of its own, and its picture."""
