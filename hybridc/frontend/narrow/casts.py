"""Cast from and to types of at most 8 bits, whose codes tensors hold; and BitCast."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir
from onnx import NodeProto
from tvm import relax, te, tirx
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from hybridc.frontend.narrow.formats import FORMATS, Format


def cast(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """By the type's numbers, and float32, as onnx does; None where neither type is narrow."""
    x, emit = importer._nodes[proto.input[0]], importer.bb.emit
    target = ir.DataType(node.attributes["to"].as_int())
    decoder, encoder = (FORMATS.get(dtype) for dtype in (_type_of(node), target))
    if decoder is None and encoder is None:
        return None
    if decoder is not None:
        x = emit(importer.bb.call_te(partial(_decoded, decoder), x, primfunc_name_hint="decoded"))
    if encoder is None:
        return relax.op.astype(x, str(target.numpy()))
    if not encoder.is_integer and str(x.ty.dtype) != "float32":
        x = emit(relax.op.astype(x, "float32"))
    saturates = bool(node.attributes.get_int("saturate", 1))
    rounding = node.attributes.get_string("round_mode", "up") or "up"
    encode = partial(_encoded, encoder, saturates, rounding)
    return importer.bb.call_te(encode, x, primfunc_name_hint="encoded")


def bit_cast(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """Between types of one width, of whole bytes."""
    target = str(ir.DataType(node.attributes["to"].as_int()).numpy())

    def body(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *at: tirx.reinterpret(target, x(*at)), name="reinterpreted")

    return importer.bb.call_te(body, importer._nodes[proto.input[0]], primfunc_name_hint="bit_cast")


def _type_of(node: ir.Node) -> ir.DataType:
    value = node.inputs[0]
    assert value is not None and value.dtype is not None
    return value.dtype


def _decoded(decoder: Format, codes: te.Tensor) -> te.Tensor:
    return te.compute(codes.shape, lambda *at: decoder.decoded(codes(*at)), name="decoded")


def _encoded(encoder: Format, saturates: bool, rounding: str, numbers: te.Tensor) -> te.Tensor:
    def body(*at: object) -> object:
        return encoder.encoded(numbers(*at), saturates, rounding)

    return te.compute(numbers.shape, body, name="encoded")
