"""What only a run knows and must be checked: indices and divisors that somebody fed, trips of loops.

Whoever writes a kernel wraps such a value into a *marker*, a pure call that stands for the checked value. It
survives fusion and scheduling as any other expression; `schedules/safety/` then makes the check of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, te, tirx

from hybridc.ir import CheckKind

CHECKS = "checks"
"""Attribute of functions: for each of their checks the position of its ONNX node among the origins of a
kernel that calls the function, the operator, the kind of check, and the least and greatest legal value."""
_KINDS = {
    "hybridc_index": CheckKind.INDEX,
    "hybridc_divisor": CheckKind.DIVISOR,
    "hybridc_trips": CheckKind.TRIPS,
}


def checked_index(
    value: ir.Expr | te.TensorSlice, extent: int, operator: str, *, from_end: bool = True
) -> ir.Expr:
    """An index of an axis, int64, in 0 to `extent` - 1; of [-extent, -1] counted from the end if `from_end`.

    Any other value is a fault: the kernel reports it, and goes on with an index that lies inside.
    `operator` is what the user calls the operator that needs it.
    """
    wide = _expression(value)
    if str(wide.ty.dtype) != "int64":
        wide = tirx.Cast("int64", wide)
    lower = -extent if from_end else 0
    return _marker("hybridc_index", wide, lower, extent - 1, operator)


def checked_divisor(value: ir.Expr | te.TensorSlice, operator: str) -> ir.Expr:
    """An integer to divide by. Zero is a fault, upon which the kernel divides by another number."""
    return _marker("hybridc_divisor", _expression(value), 0, 0, operator)


def checked_trips(value: ir.Expr | te.TensorSlice, most: int, operator: str) -> ir.Expr:
    """How many trips a loop wants, int64; more than `most` are a fault."""
    return _marker("hybridc_trips", _expression(value), 0, most, operator)


def _expression(value: ir.Expr | te.TensorSlice) -> ir.Expr:
    return value.asobject() if isinstance(value, te.TensorSlice) else value


def _marker(name: str, value: ir.Expr, lower: int, upper: int, operator: str, number: int = -1) -> ir.Call:
    numbers = (tirx.IntImm("int64", n) for n in (number, lower, upper))
    return tirx.call_pure_extern(str(value.ty.dtype), name, value, *numbers, ir.StringImm(operator))


@dataclass(frozen=True, slots=True)
class Marker:
    """A value that is checked: it has to be in `lower` to `upper`, or not zero if it is a divisor."""

    value: ir.Expr
    kind: CheckKind
    number: int
    """Of the check among those of its function."""
    lower: int
    upper: int
    operator: str


def read_marker(call: ir.Call) -> Marker | None:
    """What a marker says; None for any other call."""
    if call.op.name != "tirx.call_pure_extern" or not isinstance(call.args[0], ir.StringImm):
        return None
    kind = _KINDS.get(call.args[0].value)
    if kind is None:
        return None
    _, value, number, lower, upper, operator = call.args
    return Marker(value, kind, int(number), int(lower), int(upper), operator.value)


def markers(node: object) -> list[ir.Call]:
    """All markers of a statement or expression, in order; those of an operand before the one around it."""
    found: list[ir.Call] = []

    def note(call: ir.Call) -> None:
        if read_marker(call) is not None:
            found.append(call)

    tvm_ffi.structural_walk(node, (ir.Call, note), order="post")
    return found


def checked_inputs(function: tirx.PrimFunc) -> dict[int, int]:
    """Of checks of indices, by number, the parameter of which a function looks at all elements as they are.

    Not of those that look at some elements only, under a condition, or at what is computed from them. The
    function is not scheduled yet.
    """
    extents: dict[ir.Var, int] = {}
    computed: set[int] = set()

    def note_axes(block: s_tir.SBlock) -> None:
        for axis in block.iter_vars:
            if isinstance(axis.dom.extent, tirx.IntImm):  # others follow from data
                extents[axis.var] = int(axis.dom.extent)

    def note_conditional(call: ir.Call) -> None:
        if call.op.name.rpartition(".")[2] == "if_then_else":
            computed.update(marker.number for each in markers(call) if (marker := read_marker(each)))

    tvm_ffi.structural_walk(function.body, [(s_tir.SBlock, note_axes), (ir.Call, note_conditional)])
    parameters, found = list(function.params), {}
    for call in markers(function.body):
        marker = read_marker(call)
        assert marker is not None
        value = marker.value
        while isinstance(value, tirx.Cast):
            value = value.value
        if marker.kind is not CheckKind.INDEX or not isinstance(value, ir.TensorLoad):
            continue
        axes = [axis for axis in value.indices if isinstance(axis, ir.Var)]
        is_whole = [extents.get(axis) for axis in axes] == [int(n) for n in value.source.shape]
        position = next((i for i, p in enumerate(parameters) if p.same_as(value.source)), None)
        if is_whole and len(set(axes)) == len(axes) and position is not None:
            found[marker.number] = position
    return {number: position for number, position in found.items() if number not in computed}


def numbered(function: tirx.PrimFunc, origins: Sequence[int]) -> tirx.PrimFunc:
    """The function with its markers numbered in order, equal ones alike, and the attribute CHECKS that
    lists them.

    `origins` gives for each of `markers(function.body)` the position of its ONNX node among a kernel's
    origins.
    """
    if not origins:
        return function
    checks: list[list[object]] = []
    numbers: list[tuple[ir.Call, int]] = []

    def number(call: ir.Call, mutator: tvm_ffi.StructuralMutator) -> ir.Expr:
        call = mutator.default_mutate(call)
        marker = read_marker(call)
        if marker is None:
            return call
        limits = marker.lower, marker.upper
        known = next((n for other, n in numbers if tvm_ffi.structural_equal(other, call)), len(checks))
        if known == len(checks):
            checks.append([origins[len(numbers)], marker.operator, marker.kind.value, *limits])
        numbers.append((call, known))
        return _marker(str(call.args[0].value), marker.value, *limits, marker.operator, known)

    body = tvm_ffi.structural_mutate(function.body, ((ir.Call, number),))
    changed = tirx.PrimFunc(list(function.params), body, function.ret_type, function.attrs)
    return changed.with_attr(CHECKS, checks)
