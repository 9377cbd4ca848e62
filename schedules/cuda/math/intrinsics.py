"""Elementary functions as CUDA's accurate ones, where TVM would emit its fast approximations.

TVM lowers `pow` to `__powf`, which is NaN for every negative base, and `sin` and `cos` to `__sinf` and
`__cosf`, whose error grows without bound outside [-pi, pi]; `__logf` and `__expf` lose up to half of the
digits. The accurate functions are within 2 ulp and cost nothing where memory is the limit.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Call
from tvm.tirx.op import call_pure_extern, register_intrin_lowering

ACCURATE = ("cos", "exp", "exp10", "log", "log10", "log2", "pow", "sin", "tan")
WITHOUT_HALF = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "erf", "fmod", "nearbyint"),
    *("round", "sinh", "tanh"),
)
"""TVM would name versions of these for float16, such as `hnearbyint`, that CUDA does not have, or only the
newest."""


_NAMES = {"round": "nearbyint"}
"""Of CUDA's functions where they differ. TVM's `round` takes ties to even, as on a CPU and as ONNX has it for
quantization; CUDA's takes them away from zero."""


def accurate(name: str) -> Callable[[Call], tirx.Expr]:
    """Lowering of a function to CUDA's `name` for float64 and `namef` for the rest, half types by float32.

    CUDA has no such functions of vectors: TVM's code generation calls them lane by lane, on an argument that
    it computes once. Taking lanes out of an expression here would repeat it for each, and so a chain of n
    functions 4**n times.
    """

    def lower(call: Call) -> tirx.Expr:
        dtype, _, lanes = str(call.ty.dtype).partition("x")
        if dtype == "float64":
            return call_pure_extern(str(call.ty.dtype), name, *call.args)
        wide = f"float32x{lanes}" if lanes else "float32"
        result = call_pure_extern(wide, f"{name}f", *(argument.astype(wide) for argument in call.args))
        return result if dtype == "float32" else result.astype(str(call.ty.dtype))

    return lower


def register() -> None:
    """Make TVM's CUDA code generation use them."""
    for name in (*ACCURATE, *WITHOUT_HALF):
        lowering = accurate(_NAMES.get(name, name))
        register_intrin_lowering(f"tirx.{name}", target="cuda", f=lowering, level=99)
