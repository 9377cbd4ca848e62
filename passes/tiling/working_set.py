"""Working sets: the bytes that a kernel holds while it runs, estimated before there are kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import relax

from hybridc.ir.graph import dtype_bits
from hybridc.passes.fuse.attention import Suits, any_attention, find_attention
from hybridc.passes.fuse.fuse import form_groups
from hybridc.passes.program.operators import Fact, has_fact, name_has_fact
from hybridc.passes.program.prim_funcs import OperatorFacts
from hybridc.passes.program.program import (
    Program,
    operator_name,
    tensor_dtype,
    tensor_shape,
    variables,
)
from hybridc.schedules.annotation import Pattern

MOVING_FUNCTIONS = ("halo", "rows")
"""Functions of `tile` that only move data."""


Members = tuple[relax.VarBinding, ...]


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


def largest_working_set_bytes(program: Program, suits: Suits = any_attention) -> int:
    """The largest of all kernels of a program that is not yet fused.

    Requires: `program` canonical.
    """
    return max((group.size_bytes for group in kernel_groups(program, suits)), default=0)


def kernel_groups(program: Program, suits: Suits = any_attention) -> list[KernelGroup]:
    """The kernels that `fuse_attention`, of what `suits`, and `fuse` will form, in an executable order."""
    bindings = program.bindings
    groups = [tuple(bindings[i] for i in g.members) for g in form_groups(program, _facts)]
    return [_kernel(members) for members in _with_attention(program, groups, suits)]


def _with_attention(program: Program, groups: list[Members], suits: Suits) -> list[Members]:
    """The groups, of which those from the scores of an attention to its result are one: scores are stored
    nowhere. What transposes an operand is apart, as several tiles may read what it makes."""
    position = {binding.var: i for i, binding in enumerate(program.bindings)}
    group_of = {member.var: group for group in groups for member in group}
    for match in filter(suits, find_attention(program)):
        first = match.members.index(match.scores)
        parts = dict.fromkeys(group_of[var] for var in match.members[first:])
        members = sorted((m for part in parts for m in part), key=lambda m: position[m.var])
        apart = [m for m in members if m.var in match.members[:first]]
        group_of.update((m.var, (m,)) for m in apart)
        joined = tuple(m for m in members if m not in apart)
        group_of.update((m.var, joined) for m in joined)
    distinct = {id(group): group for group in group_of.values()}
    return sorted(distinct.values(), key=lambda group: position[group[-1].var])


def _kernel(members: Members) -> KernelGroup:
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
