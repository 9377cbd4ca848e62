"""Calls of the functions of hybridc/codegen/native/mma.h."""

from __future__ import annotations

from tvm import ir, tirx
from tvm.backend.cuda.op import cuda_func_call

from hybridc.schedules.cpu.core.micro_kernel import unrolled

_HEADER = "#include <hybridc/mma.h>\n"
INT8 = "int8"
"""Both operands have 8 bits, each signed or unsigned; sums are int32."""
TF32 = "tf32"
"""float32 in memory, of which tensor cores multiply 10 bits of the fraction."""
OLDEST = {"float16": 75, "bfloat16": 80, TF32: 80, INT8: 75}
"""Architectures that have products of these types, sm_75 being Turing."""
ITEM_BYTES = {"float16": 2, "bfloat16": 2, TF32: 4, INT8: 1}
"""Of an operand's element in memory."""
_MULTIPLY_ADD = {"float16": "m16n8k16_f16", "bfloat16": "m16n8k16_bf16", TF32: "m16n8k8_tf32"}
_SHORT = {"float16": "f16", "bfloat16": "bf16"}
_SIGN_BITS = 0x80808080
"""Of four bytes: adding 128 to a signed number makes the unsigned one with this bit turned."""


def load_matrices(registers: ir.TensorLoad, row: ir.TensorLoad, *, transposed: bool) -> tirx.Stmt:
    """Four 8x8 matrices to four registers a lane; lane i names row i % 8 of matrix i / 8."""
    return _call("ldmatrix_x4_trans" if transposed else "ldmatrix_x4", registers, row)


def multiply_add(
    sums: ir.TensorLoad,
    left: ir.TensorLoad,
    right: ir.TensorLoad,
    dtype: str,
    signed: tuple[bool, bool] = (True, True),
) -> tirx.Stmt:
    """`sums += left right`: 16x8 += 16x16 16x8, or 16x8 8x8 of tf32, or 16x32 32x8 of integers, of which
    `signed` tells those of the left and the right operand."""
    if dtype == INT8:
        left_type, right_type = ("s8" if is_signed else "u8" for is_signed in signed)
        return _call(f"mma_m16n8k32_{left_type}_{right_type}", sums, left, right)
    return _call(f"mma_{_MULTIPLY_ADD[dtype]}", sums, left, right)


def packed(pair: ir.TensorLoad, first: ir.TensorLoad, dtype: str) -> tirx.Stmt:
    """Round an element of float32 in a register and the next one to 16 bits, side by side in a fragment."""
    return _call(f"pack_{_SHORT[dtype]}", pair, first)


def joined(pair: ir.TensorLoad, first: ir.TensorLoad, *, rounds: bool) -> tirx.Stmt:
    """Join an element of 16 bits in a register and the next one to one register; of float32 rounded to
    float16."""
    return _call("round_pair_f16" if rounds else "join_pair", pair, first)


def taps_transformed(
    plus: ir.TensorLoad,
    minus: ir.TensorLoad,
    first: ir.TensorLoad,
    middle: ir.TensorLoad,
    last: ir.TensorLoad,
) -> tirx.Stmt:
    """`(first + middle + last) / 2` and `(first - middle + last) / 2` of float16 in four registers each."""
    return _call("transform_taps_f16", plus, minus, first, middle, last)


def transposed(first: ir.TensorLoad, stride: int) -> tirx.Stmt:
    """Transpose the 4x4 bytes of four words in registers, so many words apart."""
    words = tirx.address_of(first), tirx.const(stride, "int32")
    return tirx.Evaluate(cuda_func_call("transpose_bytes", *words, source_code=_HEADER))


def made_unsigned(registers: ir.Var, first: ir.Expr, count: int) -> tirx.Stmt:
    """Add 128 to the signed bytes of registers, which are then unsigned."""

    def one(number: ir.Expr) -> tirx.Stmt:
        turned = tirx.BufferLoad(registers, [first + number]) ^ tirx.const(_SIGN_BITS, "uint32")
        return tirx.BufferStore(registers, turned, [first + number])

    return unrolled(count, one)


def rounded(element: ir.TensorLoad) -> tirx.Stmt:
    """Round an element in a register to tf32."""
    return _call("round_tf32", element)


def barrier() -> tirx.Stmt:
    """All threads of a block wait for each other."""
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))


def _call(name: str, *elements: ir.TensorLoad) -> tirx.Stmt:
    addresses = (tirx.address_of(element) for element in elements)
    return tirx.Evaluate(cuda_func_call(name, *addresses, source_code=_HEADER))
