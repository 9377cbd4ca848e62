"""The parts of `benchmarks/gpu.py`: each is a process of its own, `python -m gpu.PART` in `benchmarks/`."""
