"""onnx's own backend tests, run against hybridc: every operator's examples, with their expected outputs.

`python -m tests.onnx_suite` runs them all, each in a process that may die: `worker.py` is that process, and
`pool.py` replaces it; `record.py` counts outcomes and knows which tests are to pass.
"""
