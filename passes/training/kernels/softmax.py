"""Gradients of softmax and its logarithm, from their results."""

from __future__ import annotations

from tvm import relax, te, tirx

from hybridc.passes.program.program import tensor_shape
from hybridc.passes.training.gradients import placeholder


def softmax_gradient(y: relax.Expr, dy: relax.Expr, axis: int, *, is_log: bool) -> tirx.PrimFunc:
    """Softmax along `axis`: `y (dy - sum(dy y))`; of its logarithm: `dy - exp(y) sum(dy)`."""
    result, grad = placeholder(y, "y"), placeholder(dy, "dy")
    k = te.reduce_axis((0, tirx.IntImm("int64", tensor_shape(y)[axis])), "k")

    def term(*row: tirx.Var) -> tirx.Expr:
        at = (*row[:axis], k, *row[axis:])
        return te.sum(grad[at] if is_log else grad[at] * result[at], axis=k)

    rows = [extent for i, extent in enumerate(result.shape) if i != axis]
    total = te.compute(rows, term, name="total")

    def body(*at: tirx.Var) -> tirx.Expr:
        row = total[(*at[:axis], *at[axis + 1 :])]
        return grad[at] - tirx.exp(result[at]) * row if is_log else result[at] * (grad[at] - row)

    out = te.compute(result.shape, body, name="log_softmax_gradient" if is_log else "softmax_gradient")
    return te.create_prim_func([result, grad, out])
