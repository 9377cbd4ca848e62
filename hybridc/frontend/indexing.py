"""Operators that read or write where indices say.

The indices reach Relax as they are fed: which are legal, and that some count from the end, is up to the
kernels (`passes/program/legalize.py`). TVM's converters add extents to negative ones first, after which
nobody can tell.
"""

from __future__ import annotations

import math

import onnx_ir as ir
from onnx import NodeProto
from tvm import relax, te
from tvm.ir.expr import GenericConst
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from hybridc.checks import checked_index
from hybridc.frontend.values import static_shape

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


def max_unpool(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """Zeros, with each element of the data at the row-major offset that its index is: it never counts from
    the end."""
    data, indices = _operands(importer, proto)[:2]
    shape = static_shape(node.outputs[0])
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


def roi_align(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """With checked images of the regions, which TVM's operator wants as floating point numbers, and corners
    in elements of the data: half an element is subtracted after the scale, where TVM does it before."""
    data, corners, images = _operands(importer, proto)
    emit, dtype, integer = importer.bb.emit, str(corners.ty.dtype), node.attributes.get_int
    checked = _checked(importer, images, int(data.ty.shape[0]), "RoiAlign")
    default = "half_pixel" if importer.opset >= 16 else "output_half_pixel"
    mode = node.attributes.get_string("coordinate_transformation_mode", default)
    scale = node.attributes.get_float("spatial_scale", 1.0)
    corners = corners if scale == 1 else emit(op.multiply(corners, relax.const(scale, dtype)))
    if mode == "half_pixel":
        corners = emit(op.subtract(corners, relax.const(0.5, dtype)))
    column = emit(op.expand_dims(emit(op.astype(checked, dtype)), 1))
    return op.vision.roi_align(
        data,
        emit(op.concat([column, corners], 1)),
        pooled_size=(integer("output_height", 1), integer("output_width", 1)),
        spatial_scale=1.0,
        sample_ratio=integer("sampling_ratio", 0),
        aligned=mode == "half_pixel",
        mode="avg",
        layout="NCHW",
    )


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
