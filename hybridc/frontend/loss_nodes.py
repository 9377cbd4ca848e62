"""ONNX's own losses, by operators that exist for every device and have gradients; and their labels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx import NodeProto
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from hybridc.frontend.counted.ledger import TRUSTED
from hybridc.labels import PADDING_LABEL, Labels

op = relax.op
_LABELS = "hybridc.labels"
"""Key of an input's metadata: what the losses imported so far take its values as."""
_REARRANGING = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Every element of the first operand is in the result, and nothing else."""


def labels_of(value: ir.Value) -> tuple[Labels, ...]:
    """What each loss of an imported graph takes the values of an input as, if they are its labels."""
    return tuple(value.meta.get(_LABELS, ()))


def _fed(labels: ir.Value | None) -> ir.Value | None:
    """The input whose elements these are; None if they are computed."""
    while labels is not None and labels.dtype is not None and labels.dtype.is_integer():
        node = labels.producer()
        if node is None:
            return labels if labels.is_graph_input() else None
        labels = node.inputs[0] if node.op_type in _REARRANGING else _behind_padding(node)
    return None


def _behind_padding(node: ir.Node) -> ir.Value | None:
    """What is fed where padding is filled with a label that is ignored."""
    return node.inputs[1] if node.op_type == "Where" and TRUSTED in node.meta else None


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
    """Minus the logarithm at each label, weighed by the label's weight; 0 where the label is ignored.

    The label is compared with every class: no gathering, whose gradient would have to scatter, and which a
    label of no class would make read elsewhere. Such a label is refused when it is fed; one that the model
    computes makes its loss NaN.
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
    fed = _fed(node.inputs[1])
    if fed is not None:
        asked = None if ignored == PADDING_LABEL else ignored
        fed.meta[_LABELS] = tuple(dict.fromkeys((*labels_of(fed), Labels(shape[1], asked))))
    else:
        loss = op.where(_is_legal(labels, shape[1], ignored), loss, relax.const(np.nan, dtype))
    reduction = node.attributes.get_string("reduction", "mean")
    if reduction == "none":
        return loss
    if reduction == "sum":
        return op.sum(loss)
    if weights is None and ignored is None:
        return op.mean(loss)
    return op.divide(op.sum(loss), op.sum(op.where(is_label, weight, zero)))


def _is_legal(labels: relax.Expr, classes: int, ignored: int | None) -> relax.Expr:
    def number(value: int) -> relax.Expr:
        return relax.const(value, str(labels.ty.dtype))

    legal = op.logical_and(op.greater_equal(labels, number(0)), op.less(labels, number(classes)))
    return legal if ignored is None else op.logical_or(legal, op.equal(labels, number(ignored)))
