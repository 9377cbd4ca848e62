"""Copies of the nodes of a body, with values in place of its inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import onnx_ir as ir
from onnx_ir._cloner import Cloner

from hybridc.frontend.expand.builder import TRIP, Builder

_numbers = itertools.count()


def copy_nodes(
    nodes: Iterable[ir.Node],
    values: dict[ir.Value, ir.Value | None],
    build: Builder,
    attributes: Mapping[str, ir.Attr] = {},
) -> None:
    """Record copies, and add their results to `values`, which has what the nodes read.

    References to a function's attributes are resolved by `attributes`. Names are new: a value of one trip
    must not be taken for that of another.
    """

    def name_apart(node: ir.Node) -> None:
        for output in node.outputs:
            output.name = f"{output.name}/{next(_numbers)}"

    cloner = Cloner(
        attr_map=attributes,
        value_map=values,
        metadata_props={},
        post_process=name_apart,
        resolve_ref_attrs=True,
        allow_outer_scope_values=True,
    )
    build.nodes += [cloner.clone_node(node) for node in nodes]


def copy_body(
    body: ir.Graph, operands: Iterable[ir.Value | None], build: Builder, trip: str
) -> list[ir.Value]:
    """The results of a body for these operands, in a trip that no other copy has the name of."""
    values: dict[ir.Value, ir.Value | None] = dict(zip(body.inputs, operands, strict=True))
    for initializer in body.initializers.values():
        if initializer.const_value is not None and initializer not in values:
            values[initializer] = build.constant(initializer.const_value.numpy())
    first = len(build.nodes)
    copy_nodes(body, values, build)
    for node in build.nodes[first:]:
        node.meta[TRIP] = trip
    results = []
    for output in body.outputs:
        result = values.get(output, output)
        assert result is not None
        results.append(result)
    return results


def trip_of(node: ir.Node, number: int | str) -> str:
    """The name of a trip of a loop, which may itself be in the body of another one."""
    return f"{node.meta.get(TRIP, '')}/{number}"


def discard(body: ir.Graph) -> None:
    """Take the nodes out of a body that nobody runs any more: they would count as users of what they read."""
    body.outputs.clear()
    for node in reversed(list(body)):
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
                discard(attribute.as_graph())
        body.remove(node, safe=True)
