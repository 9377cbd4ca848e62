"""Gradients of sums of products."""

from __future__ import annotations

import pytest
from tvm import relax, te, tirx, topi

from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import assert_gradients, normal

CASES: dict[str, tuple[list[tuple[int, ...]], tuple[int, ...]]] = {
    "bij,jk->bik": ([(2, 3, 4), (4, 5)], (2, 3, 5)),
    "bij,bkj->bik": ([(2, 3, 4), (2, 5, 4)], (2, 3, 5)),
    "bij->bj": ([(2, 3, 4)], (2, 4)),
    "ij->ji": ([(3, 4)], (4, 3)),
    "i,j->ij": ([(3,), (4,)], (3, 4)),
    "ij,jk,k->i": ([(2, 3), (3, 4), (4,)], (2,)),
    "ii->i": ([(3, 3)], (3,)),
}


@pytest.mark.parametrize("subscripts", CASES)
def test_each_factor_gets_the_product_of_the_others(subscripts: str) -> None:
    shapes, result = CASES[subscripts]

    def function() -> tirx.PrimFunc:
        factors = [te.placeholder(shape, "float64") for shape in shapes]
        return te.create_prim_func([*factors, topi.einsum(subscripts, *factors)])

    def build(emitter: Emitter, **inputs: relax.Var) -> relax.Expr:
        result_type = relax.TensorType(result, "float64")
        return emitter.call(("einsum", subscripts), function, list(inputs.values()), result_type)

    assert_gradients(build, {f"x{i}": normal(i, *shape) for i, shape in enumerate(shapes)}, step=1e-3)
