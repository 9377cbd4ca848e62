"""Refuse uses of operators that TVM's importer accepts and computes wrong."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from hybridc.errors import ModelError
from hybridc.frontend import codes
from hybridc.frontend.inputs.shape_inputs import LARGEST_RANK, SHAPE_OPERANDS
from hybridc.frontend.values import NARROW_TYPES, SUPPORTED_TYPES, constant_array, static_shape

MAX_ELEMENTS = 1 << 38
"""Of one value: no machine that hybridc compiles for holds more."""
MAX_RANGE_ELEMENTS = 1 << 26
"""Of a constant `Range`, which TVM's importer computes when it imports the node: 512 MiB of int64."""

_WITHOUT = "export the network without it"


def check_nodes(graph: ir.Graph, name: str, refusals: codes.Refusals) -> None:
    """Refuse nodes of unsupported types (ModelError HC110), then those whose results would be wrong (HC114),
    then those that make more values than any machine holds (HC118)."""
    for check in (_check_type, _check_restriction, _check_size):
        doubtful = refusals.in_doubt(graph)
        for node in graph:
            try:
                if node not in doubtful:
                    check(node, name)
            except ModelError as error:
                refusals.add(error, node)


def _check_size(node: ir.Node, name: str) -> None:
    for output in node.outputs:
        check_elements(static_shape(output) or (), node, name)


def check_elements(shape: tuple[int, ...], node: ir.Node | None, name: str) -> None:
    """Raises ModelError HC118 if a result of the node, of this shape, has more values than any machine holds.

    A negative dimension left int64.
    """
    op_type = "" if node is None else node.op_type
    most = MAX_RANGE_ELEMENTS if op_type == "Range" else MAX_ELEMENTS
    if math.prod(shape) > most or min(shape, default=0) < 0:
        raise ModelError(
            codes.TOO_LARGE,
            f"{op_type} would produce more than {most} values",
            where=name if node is None else f"{name}: node {node.name!r} ({op_type})",
            remedy="check its input shapes",
        )


_MOVING = (
    *("Cast", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND"),
    *("Identity", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose"),
    *("Unsqueeze", "Where"),
)
"""Operators that take elements of at most 8 bits, whose codes they move as they are; casts know the codes."""


def _check_type(node: ir.Node, name: str) -> None:
    taken = SUPPORTED_TYPES | NARROW_TYPES if node.op_type in _MOVING else SUPPORTED_TYPES
    for value in (*node.inputs, *node.outputs):
        if value is not None and value.dtype is not None and value.dtype not in taken:
            raise ModelError(
                codes.UNSUPPORTED_TYPE,
                f"value {value.name!r} has type {value.dtype.name}",
                where=f"{name}: node {node.name!r} ({node.op_type})",
                remedy="use bool, integers of at least 8 bits, or floating point of at least 16 bits",
            )


def _check_restriction(node: ir.Node, name: str) -> None:
    reason = _reason(node)
    if reason is not None:
        raise ModelError(
            codes.WRONG_RESULT,
            f"{node.op_type} {reason}",
            where=f"{name}: node {node.name!r} ({node.op_type})",
            remedy=remedy_of(node) if node.op_type in _UNKNOWN else _WITHOUT,
        )


def is_undecided(node: ir.Node) -> bool:
    """Whether operands that say how many elements there are, or where, are not constant."""
    return any(value is not None and constant_array(value) is None for value in _deciding(node))


def remedy_of(node: ir.Node) -> str:
    """What is decided by an input that is a number or a list is constant as soon as the input is."""
    return _made_constant(_deciding(node))


def _deciding(node: ir.Node) -> list[ir.Value | None]:
    """The operands that say how many elements there are, or where."""
    return [node.inputs[i] for i in SHAPE_OPERANDS.get(node.op_type, ()) if i < len(node.inputs)]


def remedy_of_choice(node: ir.Node) -> str:
    """Likewise of a Where that chooses between the results of branches."""
    return _made_constant(node.inputs[:1])


def _made_constant(deciding: Iterable[ir.Value | None]) -> str:
    behind = _inputs_behind(deciding)
    examples = ["true" if value.dtype == ir.DataType.BOOL else "NUMBER" for value in behind]
    pairs = zip(behind, examples, strict=True)
    options = " ".join(f"--value {shlex.quote(f'{value.name}={example}')}" for value, example in pairs)
    return f"make what decides it a constant: {options}" if behind else _WITHOUT


def _inputs_behind(deciding: Iterable[ir.Value | None]) -> list[ir.Value]:
    """The graph's inputs of at most one dimension that the deciding operands are computed from, but for those
    that only give their shape."""
    waiting = list(deciding)
    seen = set[ir.Value]()
    while waiting:
        value = waiting.pop()
        if value is None or value in seen:
            continue
        seen.add(value)
        producer = value.producer()
        if producer is not None and producer.op_type not in ("Shape", "Size"):
            waiting += producer.inputs
    found = (
        value
        for value in seen
        if value.is_graph_input() and value.shape is not None and len(value.shape) <= LARGEST_RANK
    )
    return sorted(found, key=lambda value: value.name or "")


def _reason(node: ir.Node) -> str | None:
    if node.op_type in _UNKNOWN:
        return _UNKNOWN[node.op_type]
    rule = _RULES.get(node.op_type)
    try:
        return rule(node) if rule else None
    except (IndexError, TypeError, ValueError) as error:  # the checker lets some attributes out of range pass
        return f"has malformed attributes: {error}"


def refused_resize(node: ir.Node) -> str | None:
    """Why a Resize cannot be imported as it is.

    The importer computes positions from the sizes: scales must be exactly their ratio.
    """
    if node.attributes.get_int("antialias", 0):
        return "with antialias is not supported"
    coordinates = _text(node, "coordinate_transformation_mode", "half_pixel")
    if coordinates in ("tf_crop_and_resize", "half_pixel_symmetric"):
        return f"with {coordinates} is not supported"
    source, target = static_shape(node.inputs[0]), static_shape(node.outputs[0])
    if source is None or target is None:
        return "needs static shapes"
    scales = constant_array(node.inputs[-1]) if len(node.inputs) < 4 else None
    if scales is not None and scales.size:
        axes = node.attributes.get_ints("axes", range(len(source)))
        if any(float(s) * source[axis] != target[axis] for s, axis in zip(scales, axes, strict=True)):
            return "with scales that give fractional sizes is not supported"
    if coordinates == "align_corners" and any(n == 1 != o for o, n in zip(source, target, strict=True)):
        return "to one pixel with align_corners is not supported"
    mode = _text(node, "mode", "nearest")
    if mode != "nearest" and any(n < o and o % n for o, n in zip(source, target, strict=True)):
        return f"({mode}) downscales by a factor that is not an integer"
    return None


def _layer_normalization(node: ir.Node) -> str | None:
    return (
        "whose mean or standard deviation output is used is not supported" if _uses_output(node, 1) else None
    )


def _is_inf(node: ir.Node) -> str | None:
    both = node.attributes.get_int("detect_negative", 1) and node.attributes.get_int("detect_positive", 1)
    return None if both else "of one sign only is not supported"


def _space_to_depth(node: ir.Node) -> str | None:
    mode = _text(node, "mode", "DCR")
    return None if mode == "DCR" else f"with mode {mode} is not supported"


def _range(node: ir.Node) -> str | None:
    return None if static_shape(node.outputs[0]) is not None else "needs constant bounds"


def _reduce_extremum(node: ir.Node) -> str | None:
    if node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.BOOL:
        return "of booleans is not supported"
    shape = static_shape(node.inputs[0])
    return "of an empty tensor is not supported" if shape is not None and 0 in shape else None


def _along_axis(node: ir.Node) -> str | None:
    shape = static_shape(node.inputs[0])
    return None if shape is None else _bad_index(node.inputs[1], shape[node.attributes.get_int("axis", 0)])


def _along_first_axes(node: ir.Node) -> str | None:
    """The last axis of the indices lists positions along axes, from the first one behind those of the
    batch."""
    shape, indices = static_shape(node.inputs[0]), static_shape(node.inputs[1])
    if shape is None or not indices:
        return None
    first = node.attributes.get_int("batch_dims", 0)
    return _bad_index(node.inputs[1], np.array(shape[first : first + indices[-1]]))


def _max_unpool(node: ir.Node) -> str | None:
    shape = static_shape(node.outputs[0])
    return None if shape is None else _bad_index(node.inputs[1], math.prod(shape), from_end=False)


def _bad_index(value: ir.Value | None, extents: int | np.ndarray, *, from_end: bool = True) -> str | None:
    """What is wrong with indices of axes with these extents, so far as it is known before a run."""
    if np.min(extents, initial=1) == 0 and 0 not in (static_shape(value) or ()):
        return "takes elements from an axis that has none"
    indices = constant_array(value)
    if indices is None:
        return None
    lowest = -np.asarray(extents) if from_end else np.zeros_like(extents)
    outside = (indices < lowest) | (indices >= extents)
    if not outside.any():
        return None
    limits = [
        np.broadcast_to(limit, indices.shape)[outside][0] for limit in (lowest, np.asarray(extents) - 1)
    ]
    return f"has an index outside of [{limits[0]}, {limits[1]}]"


def _roi_align(node: ir.Node) -> str | None:
    shape = static_shape(node.inputs[0])
    return None if shape is None else _bad_index(node.inputs[2], shape[0], from_end=False)


def _division(node: ir.Node) -> str | None:
    divisor = constant_array(node.inputs[1])
    if divisor is not None and divisor.dtype.kind in "iu" and (divisor == 0).any():
        return "of integers by 0 has no result"
    return None


def _global_pool(node: ir.Node) -> str | None:
    shape = static_shape(node.inputs[0])
    return "needs spatial dimensions behind batch and channels" if shape and len(shape) < 3 else None


def _top_k(node: ir.Node) -> str | None:
    largest = node.attributes.get_int("largest", 1)
    return (
        None if largest in (0, 1) else f"with largest={largest}, which is neither 0 nor 1, is not supported"
    )


def _dropout(node: ir.Node) -> str | None:
    return "needs a training mode and a shape that are constant"


def _batch_normalization(node: ir.Node) -> str | None:
    return "whose statistics outputs are used is not supported" if _uses_output(node, 1) else None


_RULES: dict[str, Callable[[ir.Node], str | None]] = {
    "BatchNormalization": _batch_normalization,
    "Div": _division,
    "Dropout": _dropout,
    "Gather": _along_axis,
    "GatherElements": _along_axis,
    "GatherND": _along_first_axes,
    **dict.fromkeys(("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"), _global_pool),
    "IsInf": _is_inf,
    "LayerNormalization": _layer_normalization,
    "MaxUnpool": _max_unpool,
    "Mod": _division,
    "Range": _range,
    "ReduceMax": _reduce_extremum,
    "ReduceMin": _reduce_extremum,
    "Resize": refused_resize,
    "RoiAlign": _roi_align,
    "Scatter": _along_axis,
    "ScatterElements": _along_axis,
    "ScatterND": _along_first_axes,
    "SpaceToDepth": _space_to_depth,
    "TopK": _top_k,
    "Upsample": refused_resize,
}


_UNKNOWN = {
    "If": "needs a condition that is constant",
    "Loop": "needs a number of trips, or the most that there may be, that is constant or that --bound gives",
    "Scan": "needs inputs of known shapes",
    **dict.fromkeys(("SequenceAt", "SequenceErase", "SequenceInsert"), "needs a position that is constant"),
    **dict.fromkeys(
        ("ConcatFromSequence", "SequenceConstruct", "SequenceEmpty", "SequenceLength", "SequenceMap"),
        "makes or reads a sequence whose elements are not known",
    ),
    "SplitToSequence": "needs sizes that are constant",
}
FOLDED_AWAY = frozenset(_UNKNOWN)
"""Operators that are gone before import, or else refused."""


def _uses_output(node: ir.Node, first: int) -> bool:
    return any(output.uses() or output.is_graph_output() for output in node.outputs[first:])


def _text(node: ir.Node, attribute: str, default: str) -> str:
    return node.attributes.get_string(attribute, default) or default
