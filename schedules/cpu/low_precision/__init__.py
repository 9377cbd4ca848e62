"""Convolutions and products in bf16 and int8: VNNI dot products, and AMX tiles.

Rules are the files named `bf16_*` and `int8_*`; `amx*.py` write tiles, `vnni_matmul.py` dot products,
`bf16_storage.py` reads and writes bf16 tensors.
"""
