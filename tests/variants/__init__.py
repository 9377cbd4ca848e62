"""Networks as onnxruntime's tools write them: optimized, quantized, in float16.

`networks.py` makes small networks, `tools.py` rewrites them, `judge.py` compares what is compiled with
onnxruntime running the same file; `python -m tests.variants --json FILE` writes what becomes of all pairs.
"""
