"""Gradients of operators that move elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import relax, te, tirx, topi

from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import assert_gradients, normal, side_by_side

op = relax.op

MOVES: dict[str, Callable[[relax.Var], relax.Expr]] = {
    "reshape": lambda x: op.reshape(x, (6, 20)),
    "flatten": lambda x: op.flatten(x),
    "expand_dims": lambda x: op.expand_dims(x, [0, 2]),
    "permute_dims": lambda x: op.permute_dims(x, [1, 3, 0, 2]),
    "permute_dims_reversed": lambda x: op.permute_dims(x),
    "permute_dims_twice": lambda x: op.permute_dims(op.permute_dims(x, [1, 3, 0, 2]), [3, 1, 0, 2]),
    "broadcast_to": lambda x: op.broadcast_to(op.reshape(x, (2, 1, 60)), (3, 2, 4, 60)),
    "flip": lambda x: op.flip(x, 1),
    "tril": lambda x: op.tril(x, 1),
    "triu": lambda x: op.triu(x, -1),
    "cumsum": lambda x: op.cumsum(x, 2),
    "slice": lambda x: op.strided_slice(x, [1, 3], [1, 0], [3, 4]),
    "slice_from_the_end": lambda x: op.strided_slice(x, [1, -1], [-2, 1], [3, -1]),
    "slice_with_strides": lambda x: op.strided_slice(x, [0, 3], [1, 1], [2, 5], [1, 3]),
    "slice_backwards": lambda x: op.strided_slice(x, [3], [4], [-6], [-2]),
    "squeeze": lambda x: op.squeeze(op.reshape(x, (1, 6, 1, 20)), [0, 2]),
    "tile": lambda x: op.tile(x, (2, 1, 3, 1, 2)),
}


def test_elements_get_the_gradients_of_their_copies() -> None:
    def build(emitter: Emitter, **inputs: relax.Var) -> relax.Expr:
        return side_by_side([MOVES[name](x) for name, x in inputs.items()], emitter)

    assert_gradients(build, {name: normal(i, 2, 3, 4, 5) for i, name in enumerate(MOVES)}, step=1.0)


IMPORTED: dict[str, tuple[Callable[[te.Tensor], te.Tensor], tuple[int, ...]]] = {
    "tile": (lambda x: topi.tile(x, (2, 3, 1)), (2, 9, 2)),
    "pad": (lambda x: topi.nn.pad(x, [1, 0], [0, 2], 0.5), (4, 4)),
    "pad negative": (lambda x: topi.nn.pad(x, [-1, 2], [3, -1], 0.5), (5, 3)),
    "flip": (lambda x: topi.flip(x, 1), (3, 2)),
}


@pytest.mark.parametrize("name", IMPORTED)
def test_functions_that_the_importer_makes(name: str) -> None:
    make, shape = IMPORTED[name]

    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        def function() -> tirx.PrimFunc:
            data = te.placeholder((3, 2), "float64")
            return te.create_prim_func([data, make(data)])

        return emitter.call((name.partition(" ")[0],), function, [x], relax.TensorType(shape, "float64"))

    assert_gradients(build, {"x": normal(0, 3, 2)}, step=1.0)


def test_joined_tensors_get_their_parts() -> None:
    def build(emitter: Emitter, a: relax.Var, b: relax.Var, c: relax.Var) -> relax.Expr:
        joined = emitter.emit(op.concat([a, b, a], 1))
        return op.concat([joined, op.stack([c, c], 1)], -2)

    values = {"a": normal(0, 2, 3, 4), "b": normal(1, 2, 1, 4), "c": normal(2, 2, 4)}
    assert_gradients(build, values, step=1.0)


def test_parts_are_joined_and_unused_ones_are_zeros() -> None:
    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        parts = emitter.emit(op.split(x, [1, 4], 1))
        first, last = emitter.item(parts, 0), emitter.item(parts, 2)
        return op.multiply(op.multiply(first, last), last)

    assert_gradients(build, {"x": normal(0, 2, 5)})
