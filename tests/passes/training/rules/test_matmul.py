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


def test_a_matrix_of_several_products_has_one_for_its_gradient() -> None:
    """As that of a recurrence; of one with many rows sums are added, which moves less."""

    def build(emitter: Emitter, w: relax.Var, v: relax.Var, **rows: relax.Var) -> relax.Expr:
        products = [op.matmul(x, w) for x in rows.values()]
        columns = emitter.emit(op.permute_dims(v))
        transposed = [op.matmul(x, columns) for x in rows.values()]
        return side_by_side([*products, *transposed], emitter)

    def products(count: int) -> int:
        values = {"w": normal(0, 5, 4), "v": normal(1, 4, 5)}
        values |= {f"x{i}": normal(2 + i, count, 5) for i in range(3)}
        assert_gradients(build, values)
        program = differentiate(program_of(build, values), ["w", "v"]).program
        return sum(is_op(b.value, "matmul") for b in program.bindings)

    assert products(2) == 6 + 2
    assert products(20) == 6 + 6
