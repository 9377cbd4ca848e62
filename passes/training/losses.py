"""Losses, emitted into the forward pass of a program whose outputs are the network's."""

from __future__ import annotations

import math

import numpy as np
from tvm import relax

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import Emitter, constant
from hybridc.passes.training.kernels.cross_entropy import cross_entropy
from hybridc.passes.training.kernels.element_losses import ELEMENT_LOSSES

op = relax.op


def softmax_cross_entropy(
    emitter: Emitter, logits: relax.Expr, targets: relax.Expr, *, label_smoothing: float = 0.0
) -> relax.Var:
    """`-log softmax(logits)[target]` at all places but along the class axis, as PyTorch's `cross_entropy`.

    Logits [N, C, ...], integer targets [N, ...]. With label smoothing s the target's distribution is 1 - s on
    its class plus s / C on every class.
    """
    shape = tensor_shape(targets)
    result = relax.TensorType(shape, tensor_dtype(logits))
    made = emitter.call(
        ("softmax_cross_entropy", label_smoothing),
        lambda: cross_entropy(logits, targets, label_smoothing),
        [logits, targets],
        [result, result],
    )
    return emitter.item(made, 0)


def mse(emitter: Emitter, output: relax.Expr, target: relax.Expr) -> relax.Var:
    """The squared difference of tensors of one shape."""
    return _of_elements(emitter, "mse_loss", output, target)


def l1(emitter: Emitter, output: relax.Expr, target: relax.Expr) -> relax.Var:
    """The absolute difference of tensors of one shape."""
    return _of_elements(emitter, "l1_loss", output, target)


def bce_with_logits(emitter: Emitter, logits: relax.Expr, targets: relax.Expr) -> relax.Var:
    """The binary cross entropy of targets in [0, 1] and `sigmoid(logits)`, without overflow."""
    return _of_elements(emitter, "bce_loss", logits, targets)


def _of_elements(emitter: Emitter, name: str, output: relax.Expr, target: relax.Expr) -> relax.Var:
    """Only the two tensors are stored for the backward pass."""
    return emitter.elementwise(name, ELEMENT_LOSSES[name], output, target)


def mean(emitter: Emitter, elements: relax.Expr, examples: relax.Expr | None) -> relax.Var:
    """Of all elements; or of so many `examples`, int64[1], which come first along axis 0."""
    if examples is None:
        return emitter.emit(op.mean(elements), "loss")
    shape = tensor_shape(elements)
    index = np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    there = op.less(emitter.builder.weight(index, "index"), examples)
    counted = emitter.emit(op.where(there, elements, constant(0.0, elements)), "counted")
    count = op.multiply(op.astype(examples, tensor_dtype(elements)), constant(math.prod(shape[1:]), elements))
    return emitter.emit(op.divide(op.sum(counted), op.reshape(count, ())), "loss")
