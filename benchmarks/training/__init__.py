"""The parts of `benchmarks/training.py`."""
