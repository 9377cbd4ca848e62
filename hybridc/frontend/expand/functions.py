"""Operators that ONNX itself defines by others: their bodies are inlined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir

from hybridc.frontend.expand.builder import Builder, NotYet, Unsupported, dtype_of, shape_of


def by_body(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """The body of ONNX's function for this node. Requires: types and shapes of its inputs."""
    function = _function(node, build.opset)
    values: dict[str, ir.Value | None] = {"": None}
    values |= dict(zip(function.input, (*node.inputs, *[None] * len(function.input)), strict=False))
    for proto in function.node:
        if any(attribute.HasField("g") for attribute in proto.attribute):
            raise Unsupported("has a body with branches or loops")
        attributes = _attributes(proto, node, function)
        operands = [values[name] for name in proto.input]
        while operands and operands[-1] is None:
            operands.pop()
        made = ir.Node(proto.domain, proto.op_type, operands, attributes, num_outputs=len(proto.output))
        build.nodes.append(made)
        values |= dict(zip(proto.output, made.outputs, strict=True))
    return [values.get(name) for name, _ in zip(function.output, node.outputs, strict=False)]


def _function(node: ir.Node, opset: int) -> onnx.FunctionProto:
    """The body in operators of the newest opset that is not newer than the model's. Raises Unsupported."""
    schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)  # onnx's stubs lack its functions
    if schema.has_function:
        data = schema.get_function_with_opset_version(_newest(schema.function_opset_versions, opset))
    else:
        version = _newest(schema.context_dependent_function_opset_versions, opset)
        proto = ir.serde.serialize_node(node).SerializeToString()
        types = [_type(value).SerializeToString() for value in node.inputs]
        data = schema.get_context_dependent_function_with_opset_version(version, proto, types)
    if not data:
        raise NotYet
    return onnx.FunctionProto.FromString(data)


def _newest(versions: Sequence[int], opset: int) -> int:
    known = [version for version in versions if version <= opset]
    if not known:
        raise Unsupported(f"has no body in opset {opset}")
    return max(known)


def _type(value: ir.Value | None) -> onnx.TypeProto:
    if value is None:
        return onnx.TypeProto()
    return onnx.helper.make_tensor_type_proto(int(dtype_of(value)), shape_of(value))


def _attributes(proto: onnx.NodeProto, node: ir.Node, function: onnx.FunctionProto) -> list[ir.Attr]:
    """Attributes of a node of the body: written there, the caller's, or the function's defaults."""
    defaults = {attribute.name: attribute for attribute in function.attribute_proto}
    found = []
    for attribute in proto.attribute:
        name, of = attribute.name, attribute.ref_attr_name
        if not of:
            found.append(ir.from_proto(attribute))
        elif of in node.attributes:
            caller = node.attributes[of]
            found.append(ir.Attr(name, caller.type, caller.value))
        elif of in defaults:
            default = ir.from_proto(defaults[of])
            found.append(ir.Attr(name, default.type, default.value))
    return found
