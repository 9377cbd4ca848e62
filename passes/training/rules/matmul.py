"""Gradients of matrix products: matrix products."""

from __future__ import annotations

import math

from tvm import relax

from hybridc.passes.program.program import is_op, tensor_shape
from hybridc.passes.training.gradients import Gradient, Reverse, gradient
from hybridc.passes.training.rules.elementwise import summed_to

op = relax.op


@gradient("matmul")
def _matmul(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """`da = dy b^T`, `db = a^T dy`, summed over axes of the batch along which an operand was repeated."""
    a, b = call.args
    rows, columns = _as_matrices(reverse, a, b)
    grad = reverse.shaped(dy, _result_shape(rows, columns))
    da = db = None
    if reverse.wanted(a):
        product = reverse.emit(op.matmul(grad, _transposed(reverse, columns)))
        da = reverse.shaped(summed_to(reverse, product, rows), tensor_shape(a))
    if reverse.wanted(b):
        db = reverse.shaped(_matrix_gradient(reverse, rows, columns, grad), tensor_shape(b))
    return [da, db]


def _as_matrices(reverse: Reverse, a: relax.Expr, b: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
    """A vector on the left is a row, one on the right a column."""
    shape_a, shape_b = tensor_shape(a), tensor_shape(b)
    left = a if len(shape_a) > 1 else reverse.shaped(a, (1, *shape_a))
    right = b if len(shape_b) > 1 else reverse.shaped(b, (*shape_b, 1))
    return left, right


def _result_shape(rows: relax.Expr, columns: relax.Expr) -> tuple[int, ...]:
    a, b = tensor_shape(rows), tensor_shape(columns)
    rank = max(len(a), len(b)) - 2
    batches = [(1,) * (rank + 2 - len(shape)) + shape[:-2] for shape in (a, b)]
    return (*(max(m, n) if m and n else 0 for m, n in zip(*batches, strict=True)), a[-2], b[-1])


def _matrix_gradient(reverse: Reverse, rows: relax.Expr, columns: relax.Expr, grad: relax.Expr) -> relax.Expr:
    """Of the right operand; that of a matrix that all of a batch are multiplied with is one product."""
    shape = tensor_shape(columns)
    if len(shape) == 2 and len(tensor_shape(rows)) > 2:
        count = math.prod(tensor_shape(rows)[:-1])
        rows = reverse.shaped(rows, (count, shape[0]))
        grad = reverse.shaped(grad, (count, shape[1]))
    if len(shape) == 2 and is_op(reverse.values.get(columns), "permute_dims"):
        # as (dy^T a)^T: the transpose cancels with that of the transposed weight's own gradient
        product = reverse.emit(op.matmul(_transposed(reverse, grad), rows))
        return _transposed(reverse, product)
    product = reverse.emit(op.matmul(_transposed(reverse, rows), grad))
    return summed_to(reverse, product, columns)


def _transposed(reverse: Reverse, expr: relax.Expr) -> relax.Expr:
    """The last two axes exchanged."""
    rank = len(tensor_shape(expr))
    return reverse.permuted(expr, [*range(rank - 2), rank - 1, rank - 2])
