"""Flattened functions of the CPU -> machine code.

The passes are those of TVM's pipeline behind `flat.py`, in its order, without those that only a GPU's
functions need. Two more are left out: the one that has TVM make a second function `main` of one that is
alone in its module, and checks of arguments, which are made by `entries.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx

_INDEX_BITS = 32


@tirx.transform.prim_func_pass(opt_level=0, name="RepeatBits")
def _repeat_bits(
    function: tirx.PrimFunc, module: tvm.IRModule, context: tvm.ir.transform.PassContext
) -> tirx.PrimFunc:
    """A bfloat16 in all lanes of a vector as its bits in them: of these two TVM makes a store of the former
    into memory for the latter, which it then refuses."""

    def repeated(vector: tirx.Broadcast) -> ir.Expr:
        dtype = str(vector.ty.dtype)
        if not dtype.startswith("bfloat16"):
            return vector
        return tirx.reinterpret(dtype, tirx.Broadcast(tirx.reinterpret("uint16", vector.value), vector.lanes))

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.Broadcast, repeated)))


_PASSES = (
    tirx.transform.BF16ComputeLegalize,
    lambda: tirx.transform.NarrowDataType(_INDEX_BITS),
    s_tir.transform.LoopPartition,
    tirx.transform.VectorizeLoop,
    s_tir.transform.InjectVirtualThread,
    s_tir.transform.InjectDoubleBuffer,
    tirx.transform.StorageRewrite,
    s_tir.transform.HoistIfThenElse,
    tirx.transform.UnrollLoop,
    s_tir.transform.RenormalizeSplitPattern,
    tirx.transform.StmtSimplify,
    tirx.transform.RemoveNoOp,
    s_tir.transform.RewriteUnsafeSelect,
    tirx.transform.CommonSubexprElim,
    tirx.transform.FP8ComputeLegalize,
    tirx.transform.VerifyMemory,
    tirx.transform.SplitHostDevice,
    tirx.transform.MakePackedAPI,
    tirx.transform.FP8StorageLegalize,
    lambda: _repeat_bits,
    tirx.transform.BF16StorageLegalize,
    tirx.transform.LowerTVMBuiltin,
    tirx.transform.LowerIntrin,
    tirx.transform.SkipAssert,
)


def cpu_module(functions: Mapping[str, tirx.PrimFunc], target: tvm.target.Target) -> tvm.runtime.Module:
    """Functions as `flattened` makes them, with `global_symbol`, compiled together.

    They take arguments as they come.
    """
    bound = tirx.transform.BindTarget(target.with_host(target))
    lowered = tvm.ir.transform.Sequential([bound, *(each() for each in _PASSES)])(
        tvm.IRModule(dict(functions))
    )
    return tvm_ffi.get_global_func("target.build.llvm")(lowered, target)
