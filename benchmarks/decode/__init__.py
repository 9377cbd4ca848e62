"""The engines of `benchmarks/decode.py`, each a process of its own, and the files that they read."""
