"""Gradients of gathering and scattering."""

from __future__ import annotations

import numpy as np
from tvm import relax

from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import assert_gradients, normal, side_by_side

op = relax.op


def test_rows_taken_more_than_once_add_up() -> None:
    def build(emitter: Emitter, table: relax.Var, data: relax.Var, indices: relax.Var) -> relax.Expr:
        return side_by_side([op.take(table, indices, 0, "wrap"), op.take(data, indices, 1, "wrap")], emitter)

    indices = np.array([[0, 3, -1], [3, 3, 2]])
    assert_gradients(
        build, {"table": normal(0, 5, 19), "data": normal(1, 2, 5, 3), "indices": indices}, step=1.0
    )


def test_rows_are_taken_from_tables_of_one_shape_in_different_numbers() -> None:
    def build(emitter: Emitter, a: relax.Var, b: relax.Var, few: relax.Var, many: relax.Var) -> relax.Expr:
        return side_by_side([op.take(a, few, 0, "wrap"), op.take(b, many, 0, "wrap")], emitter)

    tables = {"a": normal(0, 5, 3), "b": normal(1, 5, 3)}
    indices = {"few": np.array([1, 4]), "many": np.array([0, 1, 1, 3, 2, 0])}
    assert_gradients(build, {**tables, **indices}, step=1.0)


def test_one_row() -> None:
    def build(emitter: Emitter, data: relax.Var) -> relax.Expr:
        return op.take(data, relax.const(-2, "int64"), 1, "wrap")

    assert_gradients(build, {"data": normal(0, 2, 5, 3)}, step=1.0)


def test_elements_and_slices() -> None:
    def build(emitter: Emitter, a: relax.Var, b: relax.Var, i: relax.Var, j: relax.Var) -> relax.Expr:
        return side_by_side([op.gather_elements(a, i, 1), op.gather_nd(b, j)], emitter)

    values = {"a": normal(0, 2, 4), "b": normal(1, 3, 4, 2)}
    integers = {"i": np.array([[0, 3, 0], [1, 1, 2]]), "j": np.array([[0, 1], [2, 3], [0, 1]])}
    assert_gradients(build, {**values, **integers}, step=1.0)


def test_scattered_updates_replace_or_add() -> None:
    def build(
        emitter: Emitter, a: relax.Var, b: relax.Var, u: relax.Var, v: relax.Var, i: relax.Var, j: relax.Var
    ) -> relax.Expr:
        results = [
            make
            for reduction in ("update", "add")
            for make in (op.scatter_elements(a, i, u, 1, reduction), op.scatter_nd(b, j, v, reduction))
        ]
        return side_by_side(results, emitter)

    values = {"a": normal(0, 2, 4), "b": normal(1, 3, 4, 2), "u": normal(2, 2, 3), "v": normal(3, 2, 2)}
    integers = {"i": np.array([[0, 3, 1], [1, 0, 2]]), "j": np.array([[0, 1], [2, 3]])}
    assert_gradients(build, {**values, **integers}, step=1.0)
