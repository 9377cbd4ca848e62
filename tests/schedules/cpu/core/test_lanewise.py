"""Named values in expressions."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx

from hybridc.schedules.cpu.core.lanewise import named
from hybridc.schedules.safety.statements import is_conditional


def names_inside(expr: ir.Expr) -> list[tirx.Let]:
    found: list[tirx.Let] = []
    tvm_ffi.structural_walk(expr, (tirx.Let, found.append))
    return found


def test_names_inside_a_value_are_moved_in_front_of_it():
    x = tirx.Var("x", "float32")
    result = named(named(x + x, lambda t: t * t) + x, lambda t: t * t)
    assert isinstance(result, tirx.Let) and isinstance(result.body, tirx.Let)
    assert names_inside(result.value) == names_inside(result.body.value) == []


def test_names_inside_a_branch_stay_there():
    """The branch may read what does not exist unless the condition holds."""
    source, i = tirx.decl_buffer((4,), "float32", "source"), tirx.Var("i", "int32")
    square = named(tirx.BufferLoad(source, [i]), lambda t: t * t)
    branch = tirx.if_then_else(i < 4, square, tirx.const(0, "float32"))
    result = named(branch, lambda t: t + t)
    assert isinstance(result, tirx.Let) and names_inside(result.body) == []
    assert is_conditional(result.value) and len(names_inside(result.value)) == 1
