"""Gradients of matrix products."""

from __future__ import annotations

from tvm import relax

from hybridc.passes.program.program import is_op
from hybridc.passes.training.differentiate import differentiate
from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import assert_gradients, normal, program_of, side_by_side

op = relax.op


SHAPES = [
    ((3, 4), (4, 5)),
    ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (6, 4, 5)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((2, 3, 4), (4,)),
    ((4,), (4,)),
    ((3, 4), (2, 4, 5)),
]


def test_products_of_all_ranks() -> None:
    def build(emitter: Emitter, **inputs: relax.Var) -> relax.Expr:
        products = [op.matmul(inputs[f"a{i}"], inputs[f"b{i}"]) for i in range(len(SHAPES))]
        return side_by_side(products, emitter)

    values = {
        f"{name}{i}": normal(2 * i + j, *shape)
        for i, shapes in enumerate(SHAPES)
        for j, (name, shape) in enumerate(zip("ab", shapes, strict=True))
    }
    assert_gradients(build, values)


def test_a_dense_layer_transposes_no_weight_and_no_gradient_of_it() -> None:
    """`x w^T`: dw is dy^T x, which has the weight's own shape."""

    def build(emitter: Emitter, x: relax.Var, w: relax.Var) -> relax.Expr:
        return op.matmul(x, op.permute_dims(w))

    values = {"x": normal(0, 6, 4), "w": normal(1, 3, 4)}
    assert_gradients(build, values)
    program = differentiate(program_of(build, values), ["x", "w"]).program
    transposed = [b.value.args[0] for b in program.bindings if is_op(b.value, "permute_dims")]
    assert [tuple(int(n) for n in t.ty.shape) for t in transposed] == [(3, 4), (6, 3)]
