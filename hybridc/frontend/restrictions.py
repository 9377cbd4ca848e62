"""Uses of operators that TVM's importer accepts and computes wrong: refused instead."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from hybridc.errors import ModelError
from hybridc.frontend import codes


def check_restrictions(graph: ir.Graph, name: str) -> None:
    """Raises ModelError HC114 for the first node whose result would be wrong."""
    for node in graph:
        rule = _RULES.get(node.op_type)
        reason = rule(node) if rule else None
        if reason is not None:
            raise ModelError(
                codes.WRONG_RESULT,
                f"{node.op_type} {reason}",
                where=f"{name}: node {node.name!r} ({node.op_type})",
                remedy="export the network without it",
            )


def _resize(node: ir.Node) -> str | None:
    mode = _text(node, "mode", "nearest")
    if node.attributes.get_int("antialias", 0):
        return "with antialias is not supported"
    if _text(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        return "with tf_crop_and_resize is not supported"
    source, target = _shape(node.inputs[0]), _shape(node.outputs[0])
    if mode not in ("linear", "cubic"):
        return None
    if source is None or target is None:
        return "needs static shapes"
    if any(new < old and old % new for old, new in zip(source, target, strict=True)):
        return f"({mode}) shrinks by a factor that is no integer"
    return None


def _layer_normalization(node: ir.Node) -> str | None:
    return "with its mean or deviation used is not supported" if _uses_output(node, 1) else None


def _is_inf(node: ir.Node) -> str | None:
    both = node.attributes.get_int("detect_negative", 1) and node.attributes.get_int("detect_positive", 1)
    return None if both else "of one sign only is not supported"


def _mod(node: ir.Node) -> str | None:
    divisor = _constant(node.inputs[1])
    if not node.attributes.get_int("fmod", 0):
        return None
    if divisor is None or not np.isfinite(divisor).all():
        return "with fmod needs a finite constant divisor"
    return None


def _reduce_extremum(node: ir.Node) -> str | None:
    shape = _shape(node.inputs[0])
    return "of an empty tensor is not supported" if shape is not None and 0 in shape else None


def _gather(node: ir.Node) -> str | None:
    indices, shape = _constant(node.inputs[1]), _shape(node.inputs[0])
    if indices is None or shape is None or not indices.size:
        return None
    extent = shape[node.attributes.get_int("axis", 0)]
    if indices.min() < -extent or indices.max() >= extent:
        return f"has an index outside of [-{extent}, {extent - 1}]"
    return None


def _non_max_suppression(node: ir.Node) -> str | None:
    parameters = [value for value in node.inputs[2:] if value is not None]
    return None if all(_constant(p) is not None for p in parameters) else "needs constant parameters"


def _dropout(node: ir.Node) -> str | None:
    return "is supported in inference only, without its mask"


def _batch_normalization(node: ir.Node) -> str | None:
    return "with its statistics used is not supported" if _uses_output(node, 1) else None


_RULES: dict[str, Callable[[ir.Node], str | None]] = {
    "BatchNormalization": _batch_normalization,
    "Dropout": _dropout,
    "Gather": _gather,
    "IsInf": _is_inf,
    "LayerNormalization": _layer_normalization,
    "Mod": _mod,
    "NonMaxSuppression": _non_max_suppression,
    "ReduceMax": _reduce_extremum,
    "ReduceMin": _reduce_extremum,
    "Resize": _resize,
}


def _uses_output(node: ir.Node, first: int) -> bool:
    return any(output.uses() or output.is_graph_output() for output in node.outputs[first:])


def _text(node: ir.Node, attribute: str, default: str) -> str:
    return node.attributes.get_string(attribute, default) or default


def _shape(value: ir.Value | None) -> tuple[int, ...] | None:
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return tuple(int(dim) for dim in value.shape)


def _constant(value: ir.Value | None) -> np.ndarray | None:
    return None if value is None or value.const_value is None else value.const_value.numpy()
