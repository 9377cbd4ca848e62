"""The function that TVM's CUDA code generator calls to make an image of a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tvm_ffi

NAME = "tvm_callback_cuda_compile"


@contextmanager
def cuda_compiler(compile_source: Callable[[str], bytes]) -> Iterator[None]:
    """Lets `compile_source` (CUDA C++ -> image) stand for TVM's own, and then puts back what was there.

    TVM registers its own only with the first CUDA target, so that nothing may have been there."""
    previous = tvm_ffi.get_global_func(NAME, allow_missing=True)
    tvm_ffi.register_global_func(NAME, compile_source, override=True)
    try:
        yield
    finally:
        if previous is not None:
            tvm_ffi.register_global_func(NAME, previous, override=True)
        else:
            tvm_ffi.registry.remove_global_func(NAME)
