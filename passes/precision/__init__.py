"""Stage `precision`: which kernels compute in bf16 or int8.

`precision.py` is the stage, `quantized.py` rewrites products of dequantized numbers, `bf16_storage.py`
keeps tensors between bf16 kernels in bf16.
"""
