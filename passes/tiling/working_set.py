"""Working sets: the bytes that a kernel holds while it runs, estimated before there are kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import relax

from hybridc.ir.graph import dtype_bits
from hybridc.passes.fuse.fuse import form_groups
from hybridc.passes.program.operators import Fact, has_fact, name_has_fact
from hybridc.passes.program.prim_funcs import OperatorFacts, Pattern
from hybridc.passes.program.program import (
    Program,
    operator_name,
    tensor_dtype,
    tensor_shape,
    variables,
)

MOVING_FUNCTIONS = ("halo", "rows")
"""Functions of `tile` that only move data."""


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """Bindings that `fuse` makes one kernel."""

    members: tuple[relax.VarBinding, ...]
    inputs: tuple[relax.Var, ...]
    """Variables that they read and do not define, each once."""
    size_bytes: int
    """Of all that the kernel reads and writes."""
    is_view: bool
    """Whether it needs no kernel."""
    only_moves: bool
    """Whether it only moves data."""

    @property
    def result(self) -> relax.Var:
        """The variable that the last member defines."""
        return self.members[-1].var


def largest_working_set_bytes(program: Program) -> int:
    """The largest of all kernels of a program that is not yet fused.

    Requires: `program` canonical.
    """
    return max((group.size_bytes for group in kernel_groups(program)), default=0)


def kernel_groups(program: Program) -> list[KernelGroup]:
    """The kernels that `fuse` will form, in an executable order."""
    bindings = program.bindings
    return [_kernel(tuple(bindings[i] for i in g.members)) for g in form_groups(program, _facts)]


def _kernel(members: tuple[relax.VarBinding, ...]) -> KernelGroup:
    own = {member.var for member in members}
    read = dict.fromkeys(v for member in members for v in variables(member.value))
    inputs = tuple(v for v in read if v not in own)
    last = members[-1]
    is_view = not isinstance(last.value, relax.Call) or has_fact(last.value, Fact.VIEW)
    only_moves = is_view or all(_only_moves(operator_name(member.value)) for member in members)
    bytes_moved = 0 if is_view else sum(map(size_bytes, (*inputs, last.var)))
    return KernelGroup(members, inputs, bytes_moved, is_view, only_moves)


def _only_moves(name: str) -> bool:
    return name in MOVING_FUNCTIONS or name_has_fact(name, Fact.VIEW | Fact.MOVEMENT)


def size_bytes(var: relax.Expr) -> int:
    """Bytes of a tensor, or of all tensors of a tuple."""
    if isinstance(var.ty, relax.TupleType):
        return sum(size_bytes(relax.Var("field", field)) for field in var.ty.fields)
    return math.prod(tensor_shape(var)) * dtype_bits(tensor_dtype(var)) // 8


def _facts(binding: relax.VarBinding, _: Program) -> OperatorFacts:
    """What `fuse` finds by legalising the operator, here estimated by its name."""
    if not isinstance(binding.var.ty, relax.TensorType):
        return OperatorFacts(Pattern.OPAQUE)
    simple = name_has_fact(operator_name(binding.value), Fact.ELEMENTWISE)
    return OperatorFacts(Pattern.ELEMENTWISE if simple else Pattern.OUT_ELEMENTWISE_FUSABLE)
