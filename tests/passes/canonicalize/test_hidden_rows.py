"""Choices that a compiler knows are none, and rows are hidden behind the product, not in front of it."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.program.program import Program, ProgramBuilder, operator_name
from tests.support.programs import drawn, run_llvm

op = relax.op
X, V = relax.TensorType((2, 5, 7), "float32"), relax.TensorType((2, 7, 3), "float32")


def operators(program: Program) -> list[str]:
    return [operator_name(binding.value) for binding in program.bindings]


def weighted(rows: np.ndarray | None, hidden: float = 0.0) -> Program:
    """softmax(x) @ v, where rows of weights are `hidden` by a condition: an input, or what is known."""
    inputs = [relax.Var("x", X), relax.Var("v", V), relax.Var("c", relax.TensorType((2, 5, 1), "float32"))]
    builder = ProgramBuilder(inputs)

    def emit(expr: relax.Expr) -> relax.Var:
        return builder.emit(expr, ("node",), "t")

    if rows is None:
        condition = emit(op.less(inputs[2], relax.const(0.0, "float32")))
    else:
        condition = builder.weight(rows, "rows")
    number = builder.weight(np.array([hidden], np.float32), "zero")
    weights = emit(op.where(condition, number, emit(op.nn.softmax(inputs[0], axis=-1))))
    return builder.finish([emit(op.matmul(weights, inputs[1]))])


def agrees(before: Program, after: Program) -> None:
    fed = drawn(0, 2, 5, 7), drawn(1, 2, 7, 3), drawn(2, 2, 5, 1)
    results = [run_llvm(p.module, *fed, *p.weights.values()) for p in (before, after)]
    wanted, found = (np.asarray(result[0]) for result in results)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_rows_are_hidden_behind_the_product():
    before = weighted(None)
    after = canonicalize(before)
    assert operators(after) == ["less", "softmax", "matmul", "where"]
    agrees(before, after)


def test_other_numbers_than_zero_stay_in_front():
    assert operators(canonicalize(weighted(None, hidden=0.5))) == ["less", "softmax", "where", "matmul"]


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        (np.zeros((5, 1), bool), ["softmax", "matmul"]),
        (np.arange(5)[:, None] == 2, ["softmax", "matmul", "where"]),
        (np.arange(7) == 2, ["softmax", "where", "matmul"]),
    ],
    ids=["none", "one_row", "one_column"],
)
def test_what_is_known_of_the_condition(rows: np.ndarray, left: list[str]) -> None:
    before = weighted(rows)
    after = canonicalize(before)
    assert operators(after) == left
    agrees(before, after)


def test_a_choice_that_makes_a_tensor_larger_stays():
    x = relax.Var("x", relax.TensorType((1, 7), "float32"))
    builder = ProgramBuilder([x])
    never = builder.weight(np.zeros((5, 1), bool), "never")
    chosen = builder.emit(op.where(never, relax.const(0.0, "float32"), x), ("node",), "t")
    assert operators(canonicalize(builder.finish([chosen]))) == ["where"]


@pytest.mark.parametrize(("last", "left"), [((2, 5, 7), []), ((10, 7), ["reshape"])])
def test_views_there_and_back_are_none(last: tuple[int, ...], left: list[str]) -> None:
    x = relax.Var("x", X)
    builder = ProgramBuilder([x])
    longer = builder.emit(op.expand_dims(x, 1), ("node",), "t")
    back = builder.emit(op.reshape(longer, last), ("node",), "t")
    result = builder.emit(op.exp(back), ("node",), "t")
    found = operators(canonicalize(builder.finish([result])))
    assert [name for name in found if name != "expand_dims"] == [*left, "exp"]
    assert ("expand_dims" in found) == bool(left)
