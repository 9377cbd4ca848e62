"""Calls of the functions of hybridc/codegen/native/mma.h."""

from __future__ import annotations

from tvm import ir, tirx
from tvm.backend.cuda.op import cuda_func_call

_HEADER = "#include <hybridc/mma.h>\n"
TF32 = "tf32"
"""float32 in memory, of which tensor cores multiply 10 bits of the fraction."""
OLDEST = {"float16": 75, "bfloat16": 80, TF32: 80}
"""Architectures that have products of these types, sm_75 being Turing."""
_MULTIPLY_ADD = {"float16": "m16n8k16_f16", "bfloat16": "m16n8k16_bf16", TF32: "m16n8k8_tf32"}
_SHORT = {"float16": "f16", "bfloat16": "bf16"}


def load_matrices(registers: ir.TensorLoad, row: ir.TensorLoad, *, transposed: bool) -> tirx.Stmt:
    """Four 8x8 matrices to four registers a lane; lane i names row i % 8 of matrix i / 8."""
    return _call("ldmatrix_x4_trans" if transposed else "ldmatrix_x4", registers, row)


def multiply_add(sums: ir.TensorLoad, left: ir.TensorLoad, right: ir.TensorLoad, dtype: str) -> tirx.Stmt:
    """`sums += left right`: 16x8 += 16x16 16x8, or 16x8 8x8 of tf32."""
    return _call(f"mma_{_MULTIPLY_ADD[dtype]}", sums, left, right)


def packed(pair: ir.TensorLoad, first: ir.TensorLoad, dtype: str) -> tirx.Stmt:
    """Round an element of float32 in a register and the next one to 16 bits, side by side in a fragment."""
    return _call(f"pack_{_SHORT[dtype]}", pair, first)


def rounded(element: ir.TensorLoad) -> tirx.Stmt:
    """Round an element in a register to tf32."""
    return _call("round_tf32", element)


def barrier() -> tirx.Stmt:
    """All threads of a block wait for each other."""
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))


def _call(name: str, *elements: ir.TensorLoad) -> tirx.Stmt:
    addresses = (tirx.address_of(element) for element in elements)
    return tirx.Evaluate(cuda_func_call(name, *addresses, source_code=_HEADER))
