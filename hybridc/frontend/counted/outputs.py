"""Counts of padded outputs, as further results of the graph."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from hybridc.frontend.counted.ledger import Ledger
from hybridc.frontend.counted.rewrites import OPENING
from hybridc.frontend.counted.sources import SOURCES
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


def return_counts(graph: ir.Graph, ledger: Ledger) -> None:
    """Append the counts of outputs to these."""
    numbers: list[int] = []
    by_output = []
    for output in list(graph.outputs):
        cuts = []
        for axis, number in sorted(ledger.axes(output).items()):
            if number not in numbers:
                numbers.append(number)
            cuts.append((axis, numbers.index(number)))
        by_output.append(tuple(cuts))
    graph.outputs.extend(ledger.count(number) for number in numbers)
    graph.meta[_CUTS] = Cuts(tuple(by_output))


def cuts_of(graph: ir.Graph) -> Cuts:
    """What `return_counts` noted."""
    found: Cuts = graph.meta[_CUTS]
    return found
