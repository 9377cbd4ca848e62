"""Whether two buffers have one place in memory, as a kernel's result may have that of an operand
(`Kernel.may_overwrite`)."""

from __future__ import annotations

from tvm import ir, tirx

from hybridc.schedules.cpu.core.dot_products import define, with_llvm
from hybridc.schedules.cpu.core.micro_kernel import integer

_DIFFER = "hybridc_differ"
_FUNCTION = define(
    f"i32 @{_DIFFER}(ptr %a, ptr %b)", "%same = icmp ne ptr %a, %b", "%r = zext i1 %same to i32", "ret i32 %r"
).replace("alwaysinline", "noinline nounwind willreturn memory(none)")
"""Not inlined: where parameters are said not to alias, a compiler might think that it knows the answer."""


def differ(a: ir.Var, b: ir.Var) -> ir.Expr:
    """Whether two buffers begin at different places."""
    starts = [tirx.address_of(tirx.BufferLoad(each, [integer(0)] * len(each.shape))) for each in (a, b)]
    return tirx.call_pure_extern("int32", _DIFFER, *starts) != tirx.const(0, "int32")


def within(body: tirx.Stmt) -> tirx.Stmt:
    """A statement that may call `differ`."""
    return with_llvm(_FUNCTION, body)
