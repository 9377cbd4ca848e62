"""Gradients of losses that are one function."""

from __future__ import annotations

from tvm import relax

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import Gradient, Reverse, gradient, operands, rule_name
from hybridc.passes.training.kernels.cross_entropy import cross_entropy_gradient
from hybridc.passes.training.kernels.element_losses import ELEMENT_GRADIENTS, TARGET_GRADIENTS


@gradient("softmax_cross_entropy")
def _softmax_cross_entropy(
    reverse: Reverse, call: relax.Call, y: relax.Var, dy: list[relax.Expr | None]
) -> list[Gradient]:
    """From the logits and the logarithm of their sum, which is small."""
    logits, targets = operands(call)
    smoothing = float(reverse.attribute(call, "label_smoothing"))
    of_loss = dy[0]
    assert of_loss is not None
    lse = reverse.item(y, 1)
    result = reverse.call(
        ("softmax_cross_entropy_gradient", smoothing),
        lambda: cross_entropy_gradient(logits, targets, smoothing, lse, of_loss),
        [logits, targets, lse, of_loss],
        relax.TensorType(tensor_shape(logits), tensor_dtype(logits)),
    )
    return [result, None]


@gradient(*ELEMENT_GRADIENTS)
def _element_loss(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    name, (output, target) = rule_name(call), operands(call)
    return [
        reverse.elementwise(f"{name}_{operand}gradient", bodies[name], output, target, dy)
        if reverse.wanted(argument)
        else None
        for argument, operand, bodies in (
            (output, "", ELEMENT_GRADIENTS),
            (target, "target_", TARGET_GRADIENTS),
        )
    ]
