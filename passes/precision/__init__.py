"""Stage `precision`: which kernels compute in bf16 or int8, and what is stored in 16 or 8 bits.

`precision.py` is the stage, `quantized.py` rewrites products of dequantized numbers as the functions of
`integer_functions.py`, with a GPU in front of `fuse`; without one `requantize.py` multiplies the scales
between them when compiling. `bf16_storage.py` keeps tensors between bf16 kernels in bf16. `wide_program.py`,
in front of all, makes networks of 16-bit floats float32, and `narrow_storage.py` stores tensors in 16 bits.
`stored_caches.py` says which keys and values of a decoder are to have fewer bits than in the model, and
`integer_caches.py` stores them in rows of 8-bit integers.
"""
