"""Gradients clipped by their global norm, as by `torch.nn.utils.clip_grad_norm_`.

Pascanu et al., On the difficulty of training recurrent neural networks, 2013.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from hybridc.passes.program.program import tensor_shape
from hybridc.passes.training.gradients import Emitter, constant

_LEAST_NORM = 1e-6
"""PyTorch's, added to the norm: gradients that are all zero stay so."""


def clipped(emitter: Emitter, gradients: Sequence[relax.Expr], largest_norm: float) -> list[relax.Expr]:
    """The gradients of all parameters, scaled alike where the 2-norm of all their elements is larger.

    Each is read once for the norm before the first is scaled: all of them live at the same time. A norm that
    is no number makes all of them none, so that the run is seen to fail.
    """
    op, first = relax.op, gradients[0]
    squares = [_sum_of_squares(emitter, gradient) for gradient in gradients]
    total = squares[0]
    for square in squares[1:]:
        total = emitter.emit(op.add(total, square), "squares")
    norm = op.add(op.sqrt(total), constant(_LEAST_NORM, first))
    scale = emitter.emit(op.divide(constant(largest_norm, first), norm), "clip_scale")
    one = constant(1.0, first)  # a minimum with it might be 1 where the scale is no number
    factor = emitter.emit(op.where(op.greater_equal(scale, one), one, scale), "clip_factor")
    return [emitter.emit(op.multiply(g, factor), "clipped") for g in gradients]


def _sum_of_squares(emitter: Emitter, gradient: relax.Expr) -> relax.Var:
    """By rows first: one float32 sum over millions of elements would lose three digits."""
    square = relax.op.multiply(gradient, gradient)
    rows = list(range(1, len(tensor_shape(gradient))))
    if rows:
        square = emitter.emit(relax.op.sum(square, rows), "squares")
    return emitter.emit(relax.op.sum(square), "squares")
