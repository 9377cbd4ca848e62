"""Gradients of matrix products: matrix products."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from tvm import relax

from hybridc.passes.program.program import is_op, tensor_shape
from hybridc.passes.training.gradients import Gradient, Product, Recorded, Reverse, gradient
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
    if reverse.wanted(b) and b in reverse.shared_matrices:
        reverse.products.setdefault(b, []).append((rows, grad))
    elif reverse.wanted(b):
        db = reverse.shaped(_matrix_gradient(reverse, rows, columns, grad), tensor_shape(b))
    return [da, db]


def shared_matrices(tape: Iterable[Recorded]) -> frozenset[relax.Var]:
    """Matrices that several others are multiplied with, as those of a recurrence in each step, whose gradient
    is made by one product in the end.

    Of a matrix [k, n] and m rows each: to put operands together moves 2 m (k + n) elements, and to add
    a product to the sum so far 4 k n.
    """
    products = [r.value for r in tape if isinstance(r.value, relax.Call) and is_op(r.value, "matmul")]
    readers = Counter(call.args[1] for call in products if isinstance(call.args[1], relax.Var))

    def is_apart(call: relax.Call) -> bool:
        a, b = map(tensor_shape, call.args)
        return not len(a) == len(b) == 2 or a[0] * (a[1] + b[1]) > 2 * math.prod(b)

    apart = {call.args[1] for call in products if is_apart(call)}
    return frozenset(var for var, count in readers.items() if count > 1 and var not in apart)


def sum_of_products(reverse: Reverse, matrix: relax.Var, products: Sequence[Product]) -> relax.Expr:
    """What `products` add to the gradient of a matrix that they share."""
    rows, grad = (
        parts[0] if len(parts) == 1 else reverse.emit(op.concat(list(parts), 0))
        for parts in zip(*products, strict=True)
    )
    return _matrix_gradient(reverse, rows, matrix, grad)


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
