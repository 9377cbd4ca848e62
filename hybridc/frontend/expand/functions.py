"""Operators that ONNX itself defines by others: their bodies are inlined."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir

from hybridc.frontend.expand.builder import Builder, NotYet, Unsupported, dtype_of, shape_of
from hybridc.frontend.expand.control.copies import copy_nodes


def by_body(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """The body of ONNX's function for this node. Requires: types and shapes of its inputs."""
    proto = _function(node, build.opset)
    names = list(proto.output)
    made = {name for each in proto.node for name in each.output}
    del proto.output[:]
    proto.output.extend(name for name in names if name in made)  # a result that is left out has no node
    function = ir.serde.deserialize_function(proto)
    values = dict(itertools.zip_longest(function.inputs, node.inputs[: len(function.inputs)]))
    copy_nodes(function, values, build, _defaults(node, build.opset) | dict(node.attributes))
    results = {output.name: values[output] for output in function.outputs}
    return [results.get(name) for name, _ in zip(names, node.outputs, strict=False)]


def _defaults(node: ir.Node, opset: int) -> dict[str, ir.Attr]:
    """What attributes are that a node leaves out."""
    attributes = onnx.defs.get_schema(node.op_type, opset, node.domain).attributes
    protos = {name: each.default_value for name, each in attributes.items()}
    return {name: ir.serde.deserialize_attribute(proto) for name, proto in protos.items() if proto.name}


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
