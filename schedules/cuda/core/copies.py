"""Asynchronous copies to shared memory: calls of the functions of hybridc/codegen/native/async_copy.h."""

from __future__ import annotations

from tvm import ir, tirx
from tvm.backend.cuda.op import cuda_func_call

_HEADER = "#include <hybridc/async_copy.h>\n"
COPIES_SINCE = 80
"""The oldest architecture that has them: sm_80, Ampere."""
COPY_BYTES = (4, 8, 16)
"""Of a thread at a time."""


def copied(to: ir.TensorLoad, source: ir.TensorLoad, size_bytes: int, exists: ir.Expr | None) -> tirx.Stmt:
    """Copy from an element of global memory on to one of shared memory; zeros where `exists` is false."""
    places = tirx.address_of(to), tirx.address_of(source)
    if exists is None:
        return _call(f"copy_async_{size_bytes}", *places)
    return _call(f"copy_async_{size_bytes}_if", *places, exists)


def committed() -> tirx.Stmt:
    """Make a group of the copies since the last one."""
    return _call("commit_copies")


def awaited(remaining: int) -> tirx.Stmt:
    """Wait for a thread's own copies, but for the last `remaining` groups; a barrier shows them to others."""
    return _call("await_copies", tirx.const(remaining, "int32"))


def _call(name: str, *arguments: ir.Expr) -> tirx.Stmt:
    return tirx.Evaluate(cuda_func_call(name, *arguments, source_code=_HEADER))
