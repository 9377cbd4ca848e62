"""ONNX's FlexAttention: attention whose scores and probabilities go through graphs that the node has.

ONNX's own body cannot be used: it names what such a graph reads of the network as the network does, and that
may be a name of the body.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from hybridc.frontend.expand.builder import Builder, Expansion, Unsupported, dtype_of, operand, shape_of
from hybridc.frontend.expand.control.copies import copy_body, discard, trip_of


def _flex_attention(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Query [batch, heads, rows, depth], keys and values [batch, shared heads, columns, depth or width]."""
    query, key, value = (operand(node, i) for i in range(3))
    (batch, heads, rows, depth), dtype = shape_of(query), dtype_of(query)
    shared, columns, width = shape_of(value)[1:]
    if heads % shared:
        raise Unsupported(f"of {heads} heads of queries and {shared} of keys")
    group = heads // shared
    single = ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    precision = node.attributes.get_int("softmax_precision", int(single))
    # by its root each, as ONNX has it: the product of float16 numbers stays small
    root = math.sqrt(node.attributes.get_float("scale", depth**-0.5) or 0.0)
    query, key = (build.op("Mul", x, build.constant(root, dtype)) for x in (query, key))
    query = build.reshape(query, (batch, shared, group * rows, depth))
    scores = build.op("MatMul", query, build.transpose(key, (0, 1, 3, 2)))
    scores = build.op("Cast", build.reshape(scores, (batch, heads, rows, columns)), to=precision)
    shares = build.op("Softmax", _modified(node, "score_mod", scores, build), axis=3)
    shares = build.op("Cast", _modified(node, "prob_mod", shares, build), to=int(dtype))
    context = build.op("MatMul", build.reshape(shares, (batch, shared, group * rows, columns)), value)
    return [build.reshape(context, (batch, heads, rows, width))]


def _modified(node: ir.Node, name: str, value: ir.Value, build: Builder) -> ir.Value:
    """What a graph of the node makes of a value; the value itself if there is no such graph."""
    if name not in node.attributes:
        return value
    body = node.attributes[name].as_graph()
    (result,) = copy_body(body, [value], build, trip_of(node, name))
    discard(body)
    return result


PREVIEW: dict[str, Expansion] = {"FlexAttention": _flex_attention}
