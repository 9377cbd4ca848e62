"""Operators converted here because TVM's converter is wrong or emits more than is needed.

Each takes TVM's importer, the node with safe value names (which it may change), and the same node
with inferred shapes. It returns the value of the node's first output, or None to leave the node,
changed or not, to TVM's converter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import tvm
from onnx import NodeProto
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, Pad

from hybridc.appended_rows import APPENDED_ROWS, appended_rows
from hybridc.frontend import indexing
from hybridc.frontend.counted import kernels
from hybridc.frontend.counted.operators import POSITIONS, SUPPRESSION
from hybridc.frontend.expand.appended import APPENDED, CHECKED_COUNT
from hybridc.frontend.expand.control.choices import CHECKED_TRIPS, import_choice
from hybridc.frontend.expand.elementwise.elements import SHIFT_WITHIN
from hybridc.frontend.expand.quantized.packed_product import (
    PACKED_GATHER,
    PACKED_PRODUCT,
    import_packed_gather,
    import_packed_product,
)
from hybridc.frontend.expand.recurrent.loops import recurrence
from hybridc.frontend.expand.recurrent.operators import RECURRENCE_OPERATOR
from hybridc.frontend.loss_nodes import negative_log_likelihood_loss, softmax_cross_entropy_loss
from hybridc.frontend.narrow.casts import bit_cast, cast
from hybridc.frontend.parameters import TRAINING_BATCH_NORM, TRAINING_DROPOUT
from hybridc.frontend.restrictions import is_undecided
from hybridc.frontend.values import constant_array, static_shape

MAX_CONCATENATED = 64
"""Operands of one `concat`. Its expression for an element nests a condition for each operand, and TVM's
visitors of expressions recurse: the 2,000 operands of one ONNX node would exhaust the stack. The time to
compile one grows faster than their number, too: for 128 operands it is 4.4 s, for 64 1.7 s."""

_OPAQUE = 8
"""TVM's number of a function that nothing is fused with."""

Converter = Callable[[ONNXGraphImporter, NodeProto, ir.Node], "relax.Expr | None"]


def _clip(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """One or two elementwise operators, where TVM's converter makes functions, which nothing tiles."""
    data = importer._nodes[proto.input[0]]
    bounds: list[relax.Expr | None] = []
    for position, attribute in ((1, "min"), (2, "max")):
        value = node.attributes.get_float(attribute, None)
        if value is not None:
            bounds.append(relax.const(value, data.ty.dtype.dtype))
        elif position < len(proto.input) and proto.input[position]:
            bounds.append(importer._nodes[proto.input[position]])
        else:
            bounds.append(None)
    low, high = (_bound(b, least) for b, least in zip(bounds, (-np.inf, np.inf), strict=True))
    result = data if low is None else relax.op.maximum(data, low)
    return result if high is None else relax.op.minimum(result, high)


def _arg_extremum(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> None:
    """Of bfloat16 by way of float32, which changes no comparison: TVM fails to compile pairs of bfloat16 and
    index."""
    data = importer._nodes[proto.input[0]]
    if str(data.ty.dtype) != "bfloat16":
        return
    proto.input[0] = f"{proto.output[0]}_operand"
    importer._nodes[proto.input[0]] = importer.bb.emit(relax.op.astype(data, "float32"))


def _bound(bound: relax.Expr | None, none: float) -> relax.Expr | None:
    """A bound of Clip, `none` in place of NaN, which bounds nothing."""
    if bound is None or not bound.ty.dtype.dtype.startswith(("float", "bfloat")):
        return bound
    if isinstance(bound, tvm.ir.GenericConst):
        return None if np.isnan(bound.value.numpy()) else bound
    return relax.op.where(relax.op.isnan(bound), relax.const(none, bound.ty.dtype.dtype), bound)


def _concat(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """One `concat` where a weight takes part: TVM's converter looks at its values as if it were a shape.
    A tree of them where there are many operands (`MAX_CONCATENATED`).
    """
    is_long = len(proto.input) > MAX_CONCATENATED
    if not (is_long or any(name in importer._params for name in proto.input)):
        return None
    axis = node.attributes.get_int("axis", 0)
    parts: list[relax.Expr] = [importer._nodes[name] for name in proto.input]
    while len(parts) > MAX_CONCATENATED:
        parts = [
            importer.bb.emit(relax.op.concat(parts[i : i + MAX_CONCATENATED], axis))
            for i in range(0, len(parts), MAX_CONCATENATED)
        ]
    return relax.op.concat(parts, axis)


def _expand(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """Broadcast to the inferred shape: a target dimension may be smaller than the input's."""
    target = static_shape(node.outputs[0])
    if target is None:
        return None
    data = importer._nodes[proto.input[0]]
    return data if tuple(int(dim) for dim in data.ty.shape) == target else relax.op.broadcast_to(data, target)


def _pad(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """Padding with a number by Relax's operator, which passes know, where TVM's converter makes a function.

    Mode `wrap` came with opset 19: torch writes it at 18, too, and onnxruntime takes it there.
    """
    mode = node.attributes.get_string("mode", "constant")
    operands = [importer._nodes[name] if name else None for name in proto.input]
    if mode == "wrap":
        operands += [None] * (3 - len(operands))
        return Pad._impl_v19(importer.bb, operands, {"mode": b"wrap"}, [importer._nodes, importer._params])
    data = importer._nodes[proto.input[0]]
    widths = _pad_widths(node, len(data.ty.shape))
    if mode != "constant" or widths is None or min(widths) < 0 or "float" not in str(data.ty.dtype):
        return None
    given = node.inputs[2] if len(node.inputs) > 2 else None
    number = node.attributes.get_float("value", 0.0) if given is None else constant_array(given)
    return (
        None
        if number is None
        else relax.op.nn.pad(data, widths, "constant", float(np.asarray(number).item()))
    )


def _pad_widths(node: ir.Node, rank: int) -> list[int] | None:
    """Before and behind the first axis, then the second and so on; None if a run decides them."""
    given = node.attributes.get_ints("pads", None)
    axes: list[int] = list(range(rank))
    if given is None:
        constants = [None if v is None else constant_array(v) for v in (*node.inputs, None, None, None)[1:4]]
        if constants[0] is None or (len(node.inputs) > 3 and node.inputs[3] and constants[2] is None):
            return None
        given = constants[0].tolist()
        axes = axes if constants[2] is None else [int(axis) % rank for axis in constants[2]]
    widths = [0] * (2 * rank)
    for axis, before, after in zip(axes, given[: len(axes)], given[len(axes) :], strict=True):
        widths[2 * axis : 2 * axis + 2] = [int(before), int(after)]
    return widths


def _batch_normalization(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> None:
    """ONNX weighs the old statistics with `momentum`, Relax the new ones."""
    momentum = node.attributes.get_float("momentum", 0.9)
    _set_attribute(proto, "momentum", 1.0 - momentum)


def _training_batch_norm(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """By the batch's statistics. The running ones are operands too, to compute their new values."""
    operands = [importer._nodes[name] for name in proto.input]
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    share = 1.0 - node.attributes.get_float("momentum", 0.9)
    result = relax.op.nn.batch_norm(*operands, axis=1, epsilon=epsilon, momentum=share, training=True)
    return relax.TupleGetItem(importer.bb.emit(result), 0)


def _training_dropout(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    data, ratio = importer._nodes[proto.input[0]], node.attributes.get_float("ratio", 0.5)
    return relax.TupleGetItem(importer.bb.emit(relax.op.nn.dropout(data, ratio)), 0) if ratio else data


def _conv_transpose(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> None:
    """`output_shape`, which TVM ignores, becomes the padding that leads to it (as ONNX defines it)."""
    wanted = node.attributes.get_ints("output_shape", ())
    data, weight = static_shape(node.inputs[0]), static_shape(node.inputs[1])
    if not wanted or data is None or weight is None:
        return
    source, kernel = data[2:], weight[2:]
    rank = len(source)
    strides = node.attributes.get_ints("strides", [1] * rank)
    dilations = node.attributes.get_ints("dilations", [1] * rank)
    extra = list(node.attributes.get_ints("output_padding", [0] * rank))
    upper = node.attributes.get_string("auto_pad", "NOTSET") == "SAME_UPPER"
    begins, ends = [], []
    for i, size in enumerate(wanted[-rank:]):
        total = strides[i] * (source[i] - 1) + extra[i] + (kernel[i] - 1) * dilations[i] + 1 - size
        extra[i] += max(-total, 0)
        total = max(total, 0)
        begins.append(total // 2 if upper else total - total // 2)
        ends.append(total - begins[-1])
    for name in ("output_shape", "auto_pad"):
        _remove_attribute(proto, name)
    _set_attribute(proto, "output_padding", extra)
    _set_attribute(proto, "pads", begins + ends)


def _elu(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """In other types than float32: TVM's converter has constants of that alone."""
    x = importer._nodes[proto.input[0]]
    dtype = str(x.ty.dtype)
    if dtype == "float32":
        return None
    one, zero = (relax.const(value, dtype) for value in (1, 0))
    below = relax.op.subtract(relax.op.exp(relax.op.minimum(x, zero)), one)
    alpha = relax.const(node.attributes.get_float("alpha", 1.0), dtype)
    return relax.op.where(relax.op.greater(x, zero), x, relax.op.multiply(alpha, below))


def _shift(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    shift = (
        relax.op.left_shift if node.attributes["direction"].as_string() == "LEFT" else relax.op.right_shift
    )
    return shift(*(importer._nodes[name] for name in proto.input))


def _mod(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """Of floating point numbers: by the remainder that has the sign of x, which is exact.

    Half precision goes through single precision: CUDA has no other remainder.
    """
    x, y = (importer._nodes[name] for name in proto.input)
    dtype, emit = str(x.ty.dtype), importer.bb.emit
    if not dtype.startswith(("float", "bfloat")):
        return None
    if dtype in ("float16", "bfloat16"):
        x, y = (emit(relax.op.astype(operand, "float32")) for operand in (x, y))
    remainder = emit(relax.op.mod(x, y))
    if not node.attributes.get_int("fmod", 0):
        zero = relax.const(0, str(y.ty.dtype))
        differs = relax.op.logical_xor(relax.op.less(remainder, zero), relax.op.less(y, zero))
        moves = relax.op.logical_and(differs, relax.op.not_equal(remainder, zero))
        remainder = emit(relax.op.where(moves, relax.op.add(remainder, y), remainder))
    return relax.op.astype(remainder, dtype)


def _pairwise(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """A chain of binary operators: TVM's converter stacks all operands in memory and reduces the stack.

    Operands are bound to names: TVM's visitors recurse into an expression that contains them all.
    """
    combine = {"Max": relax.op.maximum, "Min": relax.op.minimum}.get(proto.op_type, relax.op.add)
    operands = [importer._nodes[name] for name in proto.input]
    result = functools.reduce(lambda left, right: combine(importer.bb.emit(left), right), operands)
    if proto.op_type != "Mean":
        return result
    return relax.op.divide(result, relax.const(len(operands), str(operands[0].ty.dtype)))


def _pow(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """Base and exponent may differ in type; TVM raises floating point numbers only, and of one type. What a
    constant exponent makes simpler is a product, quotient or root, as in PyTorch."""
    base, exponent = (importer._nodes[name] for name in proto.input)
    types = [str(value.ty.dtype) for value in (base, exponent)]
    known = None if node.inputs[1] is None else constant_array(node.inputs[1])
    if known is not None and known.size == 1 and known.ndim <= base.ty.ndim and types[0].startswith("float"):
        simple = _simple_power(base, float(known.item()))
        if simple is not None:
            return simple
    if types[0] == types[1] and types[0].startswith("float"):
        return None
    common = types[0] if types[0].startswith("float") else "float64"
    power = relax.op.power(relax.op.astype(base, common), relax.op.astype(exponent, common))
    return relax.op.astype(power, types[0])


def _simple_power(base: relax.Expr, exponent: float) -> relax.Expr | None:
    one = relax.const(1, str(base.ty.dtype))
    match exponent:
        case 2:
            return relax.op.multiply(base, base)
        case 3:  # GELU by tanh
            return relax.op.multiply(relax.op.multiply(base, base), base)
        case -1:
            return relax.op.divide(one, base)
        case 0.5:
            return relax.op.sqrt(base)
        case -0.5:  # one over the root of the mean of squares
            return relax.op.divide(one, relax.op.sqrt(base))
    return None


def _prelu(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """By arithmetic, which broadcasts the slope as ONNX does: TVM's operator wants one slope a channel."""
    x, slope = (importer._nodes[name] for name in proto.input)
    positive = relax.op.greater(x, relax.const(0, str(x.ty.dtype)))
    return relax.op.where(positive, x, relax.op.multiply(x, slope))


def _reduce_log_sum_exp(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """The largest element is subtracted, but never an infinity: infinity minus itself is NaN."""
    if is_undecided(node):
        raise ValueError("its axes are not constant")
    given = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = given.tolist() if given is not None else node.attributes.get_ints("axes", [])
    hands_through = node.attributes.get_int("noop_with_empty_axes", 0)
    if not axes and hands_through:
        return None
    x, axes = importer._nodes[proto.input[0]], list(axes) or None
    limits = ml_dtypes.finfo(str(x.ty.dtype))
    low, high = (relax.const(float(limit), str(x.ty.dtype)) for limit in (limits.min, limits.max))
    largest = relax.op.minimum(relax.op.maximum(relax.op.max(x, axes, keepdims=True), low), high)
    terms = relax.op.exp(relax.op.subtract(x, largest))
    total = relax.op.add(relax.op.log(relax.op.sum(terms, axes, keepdims=True)), largest)
    return total if node.attributes.get_int("keepdims", 1) else relax.op.squeeze(total, axes)


def _resize(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> None:
    """Sizes instead of scales, for all axes: what `axes` and the aspect ratio mean is inferred already."""
    target = static_shape(node.outputs[0])
    if target is None:
        return
    sizes = f"{proto.output[0]}_sizes"
    importer._nodes[sizes] = relax.const(np.array(target), "int64")
    if node.op_type == "Upsample" or importer.opset < 11:
        proto.op_type = "Resize"
        _set_attribute(proto, "coordinate_transformation_mode", "asymmetric")
        _set_attribute(proto, "nearest_mode", "floor")
    data = proto.input[0]
    del proto.input[:]
    proto.input.extend([data, "", "", sizes])
    for name in ("axes", "keep_aspect_ratio_policy", "scales"):
        _remove_attribute(proto, name)


def _rms_normalization(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """Over more than one axis TVM's operator reads its weight with the wrong rank."""
    data, scale = (importer._nodes[name] for name in proto.input)
    rank, dtype = len(data.ty.shape), str(data.ty.dtype)
    axis = node.attributes.get_int("axis", -1) % rank
    if axis == rank - 1:
        return None
    wide = "float64" if dtype == "float64" else "float32"
    x = data if dtype == wide else relax.op.astype(data, wide)
    mean = relax.op.mean(relax.op.multiply(x, x), list(range(axis, rank)), keepdims=True)
    epsilon = relax.const(node.attributes.get_float("epsilon", 1e-5), wide)
    normal = relax.op.multiply(x, relax.op.rsqrt(relax.op.add(mean, epsilon)))
    return relax.op.multiply(normal if dtype == wide else relax.op.astype(normal, dtype), scale)


def _squeeze(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """Of all axes of one element, where none is named: TVM wants an attribute."""
    if len(node.inputs) > 1 or "axes" in node.attributes:
        return None
    return relax.op.squeeze(importer._nodes[proto.input[0]])


def _set_attribute(proto: NodeProto, name: str, value: float | str | list[int]) -> None:
    _remove_attribute(proto, name)
    proto.attribute.append(onnx.helper.make_attribute(name, value))


def _remove_attribute(proto: NodeProto, name: str) -> None:
    kept = [attribute for attribute in proto.attribute if attribute.name != name]
    del proto.attribute[:]
    proto.attribute.extend(kept)


def _appended_rows(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """One function, which rules know by the annotation of its block."""
    operands = [importer._nodes[name] for name in proto.input]
    attributes = {"op_pattern": _OPAQUE}
    return importer.bb.call_te(
        appended_rows, *operands, primfunc_name_hint=APPENDED_ROWS, primfunc_attrs=attributes
    )


CONVERTERS: dict[str, Converter] = {
    APPENDED: _appended_rows,
    "ArgMax": _arg_extremum,
    "ArgMin": _arg_extremum,
    "BatchNormalization": _batch_normalization,
    "BitCast": bit_cast,
    "Cast": cast,
    CHECKED_COUNT: indexing.checked_count,
    CHECKED_TRIPS: indexing.trips,
    "Clip": _clip,
    "Concat": _concat,
    "ConvTranspose": _conv_transpose,
    "Expand": _expand,
    "Gather": indexing.gather,
    "GatherElements": indexing.gather_elements,
    "GatherND": indexing.gather_nd,
    "Max": _pairwise,
    "MaxPool": indexing.max_pool,
    "MaxRoiPool": indexing.max_roi_pool,
    "MaxUnpool": indexing.max_unpool,
    "Mean": _pairwise,
    "Min": _pairwise,
    "Mod": _mod,
    "NegativeLogLikelihoodLoss": negative_log_likelihood_loss,
    "PRelu": _prelu,
    POSITIONS: kernels.positions,
    PACKED_GATHER: import_packed_gather,
    "Pad": _pad,
    PACKED_PRODUCT: import_packed_product,
    "Pow": _pow,
    "RMSNormalization": _rms_normalization,
    RECURRENCE_OPERATOR: recurrence,
    "ReduceLogSumExp": _reduce_log_sum_exp,
    "Resize": _resize,
    "RoiAlign": indexing.roi_align,
    SUPPRESSION: kernels.suppression,
    SHIFT_WITHIN: _shift,
    "Scatter": indexing.scatter_elements,
    "ScatterElements": indexing.scatter_elements,
    "ScatterND": indexing.scatter_nd,
    "Slice": indexing.slice_by_attributes,
    "SoftmaxCrossEntropyLoss": softmax_cross_entropy_loss,
    "Squeeze": _squeeze,
    "Sum": _pairwise,
    TRAINING_BATCH_NORM: _training_batch_norm,
    TRAINING_DROPOUT: _training_dropout,
    "Upsample": _resize,
    "Where": import_choice,
}
