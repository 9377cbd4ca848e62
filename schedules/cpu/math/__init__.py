"""Elementary functions on vectors, in place of calls of the scalar C library.

`intrinsics.py` registers them with TVM; `quantize.py` quantizes without divisions.
"""
