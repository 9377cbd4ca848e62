"""Machine code of NVIDIA GPUs: what a cubin says of its kernels, and which addresses their threads access.

`cubin.py` and `code.py` read what ptxas made; `interpreter.py` executes the integer part of it:
`operands.py`, `operations.py` and `integers.py` are the instructions, `liveness.py` tells which of them
matter.
"""
