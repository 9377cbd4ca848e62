"""Losses, emitted into the forward pass of a program whose outputs are the network's."""

from __future__ import annotations

from tvm import relax

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import Emitter
from hybridc.passes.training.kernels.cross_entropy import cross_entropy
from hybridc.passes.training.kernels.element_losses import ELEMENT_LOSSES

op = relax.op


def softmax_cross_entropy(
    emitter: Emitter, logits: relax.Expr, targets: relax.Expr, *, label_smoothing: float = 0.0
) -> relax.Var:
    """The mean of `-log softmax(logits)[target]` over all but the class axis, as PyTorch's `cross_entropy`.

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
    return emitter.emit(op.mean(emitter.item(made, 0)), "loss")


def mse(emitter: Emitter, output: relax.Expr, target: relax.Expr) -> relax.Var:
    """The mean squared difference of tensors of one shape."""
    return _mean_of(emitter, "mse_loss", output, target)


def l1(emitter: Emitter, output: relax.Expr, target: relax.Expr) -> relax.Var:
    """The mean absolute difference of tensors of one shape."""
    return _mean_of(emitter, "l1_loss", output, target)


def bce_with_logits(emitter: Emitter, logits: relax.Expr, targets: relax.Expr) -> relax.Var:
    """The mean binary cross entropy of targets in [0, 1] and `sigmoid(logits)`, without overflow."""
    return _mean_of(emitter, "bce_loss", logits, targets)


def _mean_of(emitter: Emitter, name: str, output: relax.Expr, target: relax.Expr) -> relax.Var:
    """Only the two tensors are stored for the backward pass."""
    return emitter.emit(op.mean(emitter.elementwise(name, ELEMENT_LOSSES[name], output, target)), "loss")
