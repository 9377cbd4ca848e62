"""Rotary embeddings, in the forms that exporters write, are one kernel each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from hybridc.ir import Device
from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.program.program import Program, ProgramBuilder, is_op, variables
from hybridc.schedules.rule import Request
from hybridc.schedules.select import schedule
from hybridc.targets import parse_target
from tests.support.programs import drawn, run_llvm

op = relax.op
SHAPE = 2, 3, 5, 8
Emit = Callable[[relax.Expr], relax.Var]
Form = Callable[[Emit, relax.Var, relax.Var, relax.Var], relax.Expr]


def split_halves(e: Emit, x: relax.Var) -> tuple[relax.Var, relax.Var]:
    parts = e(op.split(x, [x.ty.shape.values[-1] // 2], axis=-1))
    return e(relax.TupleGetItem(parts, 0)), e(relax.TupleGetItem(parts, 1))


def sliced_halves(e: Emit, x: relax.Var) -> tuple[relax.Var, relax.Var]:
    width = int(x.ty.shape.values[-1])
    begins = 0, width // 2
    first, second = (e(op.strided_slice(x, [3], [begin], [begin + width // 2], [1])) for begin in begins)
    return first, second


def of_halves(e: Emit, x: relax.Var, cos: relax.Var, sin: relax.Var) -> relax.Expr:
    a, b = split_halves(e, x)
    first = e(op.subtract(e(op.multiply(a, cos)), e(op.multiply(b, sin))))
    second = e(op.add(e(op.multiply(sin, a)), e(op.multiply(b, cos))))
    return op.concat([first, second], axis=3)


def of_whole(e: Emit, x: relax.Var, cos: relax.Var, sin: relax.Var) -> relax.Expr:
    a, b = sliced_halves(e, x)
    turned = e(op.concat([e(op.negative(b)), a], axis=-1))
    return op.add(e(op.multiply(x, cos)), e(op.multiply(turned, sin)))


def exchanged(e: Emit, x: relax.Var, cos: relax.Var, sin: relax.Var) -> relax.Expr:
    """Something else: the second half comes first."""
    b, a = split_halves(e, x)
    turned = e(op.concat([e(op.negative(b)), a], axis=-1))
    return op.add(e(op.multiply(x, cos)), e(op.multiply(turned, sin)))


def other_angles(e: Emit, x: relax.Var, cos: relax.Var, sin: relax.Var) -> relax.Expr:
    a, b = split_halves(e, x)
    first = e(op.subtract(e(op.multiply(a, cos)), e(op.multiply(b, sin))))
    second = e(op.add(e(op.multiply(a, cos)), e(op.multiply(b, sin))))
    return op.concat([first, second], axis=3)


FORMS: dict[str, tuple[Form, tuple[int, ...]]] = {
    "halves": (of_halves, (2, 1, 5, 4)),
    "halves of one position": (of_halves, (1, 4)),
    "whole": (of_whole, (1, 1, 5, 8)),
    "whole for each element": (of_whole, SHAPE),
    "whole by half an axis of one": (of_whole, (5, 1)),
}


def program(form: Form, table: tuple[int, ...]) -> Program:
    shapes = {"x": SHAPE, "cos": table, "sin": table}
    inputs = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()]
    builder = ProgramBuilder(inputs)

    def emit(expr: relax.Expr) -> relax.Var:
        return builder.emit(expr, ("node",), "t")

    return builder.finish([emit(form(emit, *inputs))])


def agrees(before: Program, after: Program, table: tuple[int, ...]) -> None:
    fed = drawn(0, *SHAPE), drawn(1, *table), drawn(2, *table)
    (wanted,), (found,) = (run_llvm(each.module, *fed) for each in (before, after))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", [name for name in FORMS if "axis of one" not in name])
def test_rotation_is_one_kernel(name: str) -> None:
    form, table = FORMS[name]
    before = program(form, table)
    after = fuse(canonicalize(before))
    assert len(after.functions) == 1
    agrees(before, after, table)


def test_known_tables_stay_weights() -> None:
    """No view of a weight is left: later passes take none."""
    x = relax.Var("x", relax.TensorType(SHAPE, "float32"))
    builder = ProgramBuilder([x])
    tables = [builder.weight(drawn(i, 5, 8), name) for i, name in enumerate(("cos", "sin"), start=1)]
    made = of_whole(lambda expr: builder.emit(expr, ("node",), "t"), x, *tables)
    before = builder.finish([builder.emit(made, ("node",), "t")])
    after = canonicalize(before)
    assert len(after.functions) == 1
    viewed = {v.name for b in after.bindings if is_op(b.value, "reshape") for v in variables(b.value)}
    assert not viewed & set(after.weights)
    (wanted,), (found,) = (
        run_llvm(each.module, drawn(0, *SHAPE), *each.weights.values()) for each in (before, after)
    )
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("form", "table"),
    [(exchanged, (5, 8)), (other_angles, (5, 4)), FORMS["whole by half an axis of one"], (of_halves, ())],
    ids=["exchanged", "other_angles", "table_of_one", "one_angle"],
)
def test_others_stay(form: Form, table: tuple[int, ...]) -> None:
    before = program(form, table)
    after = canonicalize(before)
    assert not after.functions
    agrees(before, after, table)


@pytest.mark.parametrize("target", ["avx2", "cuda:sm_75+avx2"])
def test_it_has_a_schedule(target: str) -> None:
    (function,) = fuse(canonicalize(program(*FORMS["halves"]))).functions.values()
    device = Device.GPU if target.startswith("cuda") else Device.CPU
    assert schedule(Request(function, frozenset(), parse_target(target)), device) is not None
