"""ONNX's own losses, by operators that exist for every device and have gradients."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx import NodeProto
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

op = relax.op


def softmax_cross_entropy_loss(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """Scores [N, C, ...] and labels [N, ...]; the second output are the logarithms of the probabilities."""
    scores, *rest = (importer._nodes[name] for name in proto.input)
    logarithms = importer.bb.emit(op.nn.log_softmax(scores, axis=1))
    if len(proto.output) > 1 and proto.output[1]:
        importer._nodes[proto.output[1]] = logarithms
    return _likelihood_loss(node, logarithms, *rest)


def negative_log_likelihood_loss(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """The same of logarithms of probabilities."""
    return _likelihood_loss(node, *(importer._nodes[name] for name in proto.input))


def _likelihood_loss(
    node: ir.Node, logarithms: relax.Expr, labels: relax.Expr, weights: relax.Expr | None = None
) -> relax.Expr:
    """Minus the logarithm at each label, weighed by the label's weight.

    The label is compared with every class: no gathering, whose gradient would have to scatter.
    """
    dtype, shape = str(logarithms.ty.dtype), [int(extent) for extent in logarithms.ty.shape]
    per_class = [1, -1] + [1] * (len(shape) - 2)
    classes = np.arange(shape[1], dtype=str(labels.ty.dtype)).reshape(per_class)
    is_label = op.equal(op.expand_dims(labels, 1), relax.const(classes, str(classes.dtype)))
    ignored = node.attributes.get_int("ignore_index", None)
    if ignored is not None:
        is_label = op.logical_and(is_label, relax.const(classes != ignored, "bool"))
    zero, one = relax.const(0, dtype), relax.const(1, dtype)
    weight = one if weights is None else op.reshape(weights, [shape[1] if n == -1 else n for n in per_class])
    loss = op.negative(op.sum(op.where(is_label, op.multiply(logarithms, weight), zero), axis=[1]))
    reduction = node.attributes.get_string("reduction", "mean")
    if reduction == "none":
        return loss
    if reduction == "sum":
        return op.sum(loss)
    if weights is None and ignored is None:
        return op.mean(loss)
    return op.divide(op.sum(loss), op.sum(op.where(is_label, weight, zero)))
