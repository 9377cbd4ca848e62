"""Counts of padded outputs, as further results of the graph."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from hybridc.frontend.counted.ledger import Count, Ledger
from hybridc.frontend.counted.rewrites import OPENING
from hybridc.frontend.counted.sources import SOURCES
from hybridc.frontend.expand.builder import Builder
from hybridc.frontend.values import constant_array

_CUTS = "hybridc.cuts"


@dataclass(frozen=True, slots=True)
class Cuts:
    """Of the graph's outputs; those behind the model's own are counts."""

    by_output: tuple[tuple[tuple[int, int], ...], ...]
    """For each output of the model axes that are padded, and which count says how many elements there are."""


def has_data_extents(graph: ir.Graph) -> bool:
    """Whether any node may have results of which data determine an extent."""
    return any(
        node.op_type in SOURCES
        or (node.op_type in OPENING and any(constant_array(v) is None for v in node.inputs[1:] if v))
        for node in graph
    )


def return_counts(graph: ir.Graph, ledger: Ledger, build: Builder) -> None:
    """Append the counts of outputs to these. Requires: elements of outputs come before padding."""
    counts: list[Count] = []
    by_output = []
    for output in list(graph.outputs):
        cuts = []
        for axis, count in sorted(ledger.axes(output).items()):
            if count not in counts:
                counts.append(count)
            cuts.append((axis, counts.index(count)))
        by_output.append(tuple(cuts))
    graph.outputs.extend(ledger.count(count, build) for count in counts)
    graph.extend(build.nodes)
    graph.meta[_CUTS] = Cuts(tuple(by_output))


def cuts_of(graph: ir.Graph) -> Cuts:
    """What `return_counts` noted."""
    found: Cuts = graph.meta[_CUTS]
    return found
