"""Operators that read or write where indices say.

The indices reach Relax as they are fed: which are legal, and that some count from the end, is up to the
kernels (`passes/program/legalize.py`). TVM's converters add extents to negative ones first, after which
nobody can tell.
"""

from __future__ import annotations

import math
from functools import partial

import onnx_ir as ir
from onnx import GraphProto, NodeProto
from tvm import relax, te, tirx
from tvm.ir.expr import GenericConst
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from hybridc.checks import checked_index, checked_trips
from hybridc.frontend.values import constant_array, static_shape

op = relax.op
_REDUCTIONS = {"none": "update"}
"""What Relax calls the reductions of a scatter, where it is not what ONNX calls them."""


def gather(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """One `take`, unless it is of a shape or computed at once; by one index that the model says, a slice."""
    data, indices = _operands(importer, proto)
    known = isinstance(data, GenericConst) and isinstance(indices, GenericConst)
    if known or isinstance(data, relax.ShapeExpr) or isinstance(indices, relax.ShapeExpr):
        return None
    axis, shape = node.attributes.get_int("axis", 0), static_shape(node.outputs[0])
    if isinstance(indices, GenericConst) and math.prod(indices.value.shape) == 1 and shape is not None:
        axis %= len(data.ty.shape)
        # legal, or `restrictions.py` had refused the model
        at = indices.value.numpy().item() % int(data.ty.shape[axis])
        return op.reshape(importer.bb.emit(op.strided_slice(data, [axis], [at], [at + 1])), shape)
    # TVM warns of its other modes; none of them is what the kernel does
    return op.take(data, indices, axis, mode="wrap")


def gather_elements(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    return op.gather_elements(*_operands(importer, proto), node.attributes.get_int("axis", 0))


def gather_nd(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    return op.gather_nd(*_operands(importer, proto), node.attributes.get_int("batch_dims", 0))


def scatter_elements(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """Under its old name `Scatter`, too."""
    axis = node.attributes.get_int("axis", 0)
    return op.scatter_elements(*_operands(importer, proto), axis, _reduction(node))


def scatter_nd(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    return op.scatter_nd(*_operands(importer, proto), _reduction(node))


def slice_by_attributes(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """With attributes, as before opset 10, which TVM does not know any more."""
    starts, ends = (node.attributes.get_ints(name, None) for name in ("starts", "ends"))
    if starts is None or ends is None:
        return None
    axes = node.attributes.get_ints("axes", None) or range(len(starts))
    return op.strided_slice(importer._nodes[proto.input[0]], list(axes), list(starts), list(ends))


def max_pool(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """With the offsets of the maxima in the data, the first of equal ones: as TVM knows the maxima alone,
    they are looked for once more."""
    if len(proto.output) < 2 or not proto.output[1]:
        return None
    alone = NodeProto()
    alone.CopyFrom(proto)
    del alone.output[1:]
    importer._construct_nodes(GraphProto(node=[alone]))
    maxima = importer.bb.emit(importer._nodes[proto.output[0]])
    window, data = _window(node), importer._nodes[proto.input[0]]
    by_columns = bool(node.attributes.get_int("storage_order", 0))
    importer._nodes[proto.output[1]] = importer.bb.call_te(
        partial(offsets_of_maxima, window=window, by_columns=by_columns),
        data,
        maxima,
        primfunc_name_hint="offsets_of_maxima",
    )
    return maxima


Window = tuple[tuple[int, int, int, int], ...]
"""Of a pooling, for each axis: the extent of the kernel, its stride and dilation, and the padding before."""


def _window(node: ir.Node) -> Window:
    shape, out = static_shape(node.inputs[0]), static_shape(node.outputs[0])
    if shape is None or out is None:
        raise ValueError("its result has no static shape")
    kernel = node.attributes["kernel_shape"].as_ints()
    rank = len(kernel)
    strides = node.attributes.get_ints("strides", [1] * rank)
    dilations = node.attributes.get_ints("dilations", [1] * rank)
    pads = list(node.attributes.get_ints("pads", [0] * rank))[:rank]
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    if auto == "VALID":
        pads = [0] * rank
    elif auto != "NOTSET":
        reach = [(out[2 + i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1 for i in range(rank)]
        total = [max(reach[i] - shape[2 + i], 0) for i in range(rank)]
        pads = [n // 2 if auto == "SAME_UPPER" else n - n // 2 for n in total]
    return tuple(zip(kernel, strides, dilations, pads, strict=True))


def offsets_of_maxima(data: te.Tensor, maxima: te.Tensor, window: Window, by_columns: bool) -> te.Tensor:
    """Of a pooling of data [N, C, *size] to maxima [N, C, *out]: where they are, row-major offsets in int64.

    `by_columns` counts the elements of an image from its first axis on. A window that has no such element, as
    there is a NaN in it, has the offset of some element.
    """
    size = [int(n) for n in data.shape[2:]]
    plane, weights = math.prod(size), [math.prod(size[i + 1 :]) for i in range(len(size))]
    taps = [te.reduce_axis((0, kernel), f"tap{i}") for i, (kernel, *_) in enumerate(window)]

    def offset(*at: tirx.Var) -> tirx.Expr:
        places = [
            o * stride + tap * dilation - pad
            for o, tap, (_, stride, dilation, pad) in zip(at[2:], taps, window, strict=True)
        ]
        bounds = [b for p, n in zip(places, size, strict=True) for b in (p >= 0, p < n)]
        is_inside = tirx.all(*bounds)
        flat = sum(p.astype("int64") * w for p, w in zip(places, weights, strict=True))
        found = tirx.Select(data(*at[:2], *places) == maxima(*at), flat, _int64(plane))
        return te.min(tirx.if_then_else(is_inside, found, _int64(plane)), axis=taps)

    first = te.compute(maxima.shape, offset, name="offset_in_image")

    def counted(*at: tirx.Var) -> tirx.Expr:
        flat = tirx.min(first(*at), _int64(plane - 1))
        image = (at[0] * int(data.shape[1]) + at[1]).astype("int64")
        if by_columns:
            places = [tirx.floormod(tirx.floordiv(flat, w), n) for w, n in zip(weights, size, strict=True)]
            flat = sum(p * math.prod(size[:i]) for i, p in enumerate(places))
        return image * plane + flat

    return te.compute(maxima.shape, counted, name="offset")


def max_unpool(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """Zeros, with each element of the data at the row-major offset that its index is: it never counts from
    the end."""
    data, indices = _operands(importer, proto)[:2]
    wanted = constant_array(node.inputs[2]) if len(node.inputs) > 2 else None
    shape = static_shape(node.outputs[0]) if wanted is None else tuple(int(n) for n in wanted)
    if shape is None:
        raise ValueError("its result has no static shape")
    emit, total = importer.bb.emit, math.prod(shape)
    offsets = emit(op.reshape(_checked(importer, indices, total, "MaxUnpool"), (-1,)))
    zeros = emit(op.zeros((total,), str(data.ty.dtype)))
    flat = emit(op.scatter_elements(zeros, offsets, emit(op.reshape(data, (-1,))), 0, "update"))
    return op.reshape(flat, shape)


def checked_count(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """Numbers from 0 to an attribute."""
    (counts,) = _operands(importer, proto)
    most, operator = node.attributes["most"].as_int(), node.attributes["operator"].as_string()
    return op.astype(_checked(importer, counts, most + 1, operator), str(counts.ty.dtype))


def trips(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """How many trips a loop wants, int64, at most an attribute."""
    (wanted,) = _operands(importer, proto)
    most, operator = node.attributes["most"].as_int(), node.attributes["operator"].as_string()

    def body(number: te.Tensor) -> te.Tensor:
        return te.compute(number.shape, lambda *at: checked_trips(number(*at), most, operator), name="trips")

    return importer.bb.call_te(body, wanted, primfunc_name_hint="trips")


def roi_align(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """With checked images of the regions, which TVM's operator wants as floating point numbers, and corners
    in elements of the data: half an element is subtracted after the scale, where TVM does it before."""
    data, corners, images = _operands(importer, proto)
    emit, dtype, integer = importer.bb.emit, str(corners.ty.dtype), node.attributes.get_int
    checked = _checked(importer, images, int(data.ty.shape[0]), "RoiAlign")
    default = "half_pixel" if importer.opset >= 16 else "output_half_pixel"
    mode = node.attributes.get_string("coordinate_transformation_mode", default)
    kind = node.attributes.get_string("mode", "avg")
    scale = node.attributes.get_float("spatial_scale", 1.0)
    corners = corners if scale == 1 else emit(op.multiply(corners, relax.const(scale, dtype)))
    if mode == "half_pixel":
        corners = emit(op.subtract(corners, relax.const(0.5, dtype)))
    column = emit(op.expand_dims(emit(op.astype(checked, dtype)), 1))
    result = op.vision.roi_align(
        data,
        emit(op.concat([column, corners], 1)),
        pooled_size=(integer("output_height", 1), integer("output_width", 1)),
        spatial_scale=1.0,
        sample_ratio=integer("sampling_ratio", 0),
        aligned=mode == "half_pixel",
        mode=kind,
        layout="NCHW",
    )
    if kind == "max" and 1 in [int(n) for n in data.ty.shape][2:]:
        # beside an element that has no neighbour, ONNX counts a second one with the weight 0
        result = op.maximum(emit(result), relax.const(0, str(data.ty.dtype)))
    return result


def max_roi_pool(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> None:
    """With checked images of the regions: their first column, cut off."""
    data, regions = _operands(importer, proto)
    emit, dtype = importer.bb.emit, str(regions.ty.dtype)
    first = emit(op.strided_slice(regions, [1], [0], [1]))
    rest = emit(op.strided_slice(regions, [1], [1], [5]))
    images = _checked(importer, emit(op.astype(first, "int64")), int(data.ty.shape[0]), "MaxRoiPool")
    whole = emit(op.concat([emit(op.astype(images, dtype)), rest], 1))
    proto.input[1] = _named(importer, proto, whole)


def _operands(importer: ONNXGraphImporter, proto: NodeProto) -> list[relax.Expr]:
    return [importer._nodes[name] for name in proto.input if name]


def _reduction(node: ir.Node) -> str:
    name = node.attributes.get_string("reduction", "none") or "none"
    return _REDUCTIONS.get(name, name)


def _named(importer: ONNXGraphImporter, proto: NodeProto, value: relax.Expr) -> str:
    """A name for an operand in the place of another one."""
    name = f"{proto.output[0]}_checked"
    importer._nodes[name] = value
    return name


def _checked(importer: ONNXGraphImporter, indices: relax.Expr, extent: int, operator: str) -> relax.Var:
    """The indices as int64, each checked to be in [0, extent - 1]."""

    def body(fed: te.Tensor) -> te.Tensor:
        return te.compute(
            fed.shape,
            lambda *at: checked_index(fed(*at), extent, operator, from_end=False),
            name="checked_indices",
        )

    return importer.bb.emit(importer.bb.call_te(body, indices, primfunc_name_hint="checked_indices"))


def _int64(number: int) -> tirx.IntImm:
    return tirx.IntImm("int64", number)
