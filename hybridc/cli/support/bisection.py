"""The first node of a network whose output is further from ONNX Runtime's than the tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto

from hybridc.cli.support.tolerance import Deviation, Tolerance, deviation
from hybridc.errors import ModelError
from hybridc.frontend.values import SUPPORTED_TYPES
from hybridc.scratch import scratch_folder

_EMBEDDED_BYTES = 1 << 30
"""Weights of larger models are written to files of their own: protobuf holds 2 GiB."""

Results = Callable[[Path], Iterable[tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]]]
"""Runs a model by hybridc, by each of its plans, and by ONNX Runtime: their outputs by name."""


@dataclass(frozen=True, slots=True)
class FirstMiss:
    """A node whose output misses the tolerance while what it reads does not."""

    node: str
    operator: str
    output: str
    shape: tuple[int, ...]
    max_abs_error: float
    max_rel_error: float
    elements_off: int
    fused: bool
    """Whether it misses only where the values before it are not outputs, so that kernels are fused."""

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        where = f"node {self.node!r} ({self.operator}), output {self.output!r} ({size})"
        off = f"off by {self.max_abs_error:.2e}, {self.max_rel_error:.2e} of the largest value"
        fused = ", where it is fused with nodes before it" if self.fused else ""
        return f"The first to miss is {where}: {off}, in {self.elements_off:,} elements{fused}."


def first_miss(
    model: Path, wrong: str, results: Results, tolerance_of: Callable[[np.ndarray], Tolerance]
) -> FirstMiss | None:
    """The first node, in the order of the file, of those that the output `wrong` is computed from.

    All values between nodes are outputs of one run. If none misses, as kernels are not fused then, the
    network is cut off behind one node after the other, in a binary search. None if nothing misses so.
    Raises HybridcError.
    """
    network = onnx.load(model)
    for i, node in enumerate(network.graph.node):
        node.name = node.name or f"{node.op_type}_{i}"
    numeric = _numeric(network)
    values = [
        (node, name)
        for node in _ancestors(network.graph.node, wrong)
        for name in node.output
        if name in numeric
    ]

    def miss(chosen: Sequence[tuple[NodeProto, str]], fused: bool) -> FirstMiss | None:
        with _with_outputs(network, [name for _, name in chosen]) as path:
            runs = list(results(path))
        for node, name in chosen:
            for found, expected in runs:
                off = deviation(name, found[name], expected[name], tolerance_of(expected[name]))
                if off.elements_off:
                    return _first(node, off, expected[name].shape, fused)
        return None

    try:
        found = miss(values, False)
    except ModelError:  # a value that cannot be an output: its shape depends on data
        found = None
    return found or _search(values, lambda value: miss([value], True))


def _search(
    values: Sequence[tuple[NodeProto, str]], miss: Callable[[tuple[NodeProto, str]], FirstMiss | None]
) -> FirstMiss | None:
    """The first value that misses, if it is alone; the last one may miss."""
    found = miss(values[-1])
    good, bad = -1, len(values) - 1
    while found is not None and bad - good > 1:
        middle = (good + bad) // 2
        earlier = miss(values[middle])
        good, bad, found = (good, middle, earlier) if earlier else (middle, bad, found)
    return found


def _first(node: NodeProto, off: Deviation, shape: tuple[int, ...], fused: bool) -> FirstMiss:
    return FirstMiss(
        node.name, node.op_type, off.output, shape, off.max_abs, off.max_rel, off.elements_off, fused
    )


def _ancestors(nodes: Iterable[NodeProto], value: str) -> list[NodeProto]:
    """Nodes that a value is computed from, in order."""
    producer = {output: node for node in nodes for output in node.output if output}
    needed, waiting = set[str](), [value]
    while waiting:
        name = waiting.pop()
        if name in producer and name not in needed:
            node = producer[name]
            needed.update(node.output)
            waiting += _read(node)
    return [node for node in nodes if needed.intersection(node.output)]


def _read(node: NodeProto) -> Iterator[str]:
    """Names of values that a node reads, those that its subgraphs capture included."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from _read(inner)


def _numeric(network: onnx.ModelProto) -> set[str]:
    """Values that are tensors of numbers, so far as ONNX infers it."""
    inferred = onnx.shape_inference.infer_shapes(network).graph
    types = {value.name: value.type for value in (*inferred.value_info, *inferred.output)}
    names = {name for node in network.graph.node for name in node.output if name}
    return {
        name for name in names if name not in types or types[name].tensor_type.elem_type in SUPPORTED_TYPES
    }


@contextmanager
def _with_outputs(network: onnx.ModelProto, names: Sequence[str]) -> Iterator[Path]:
    """A file of the model with these outputs alone."""
    del network.graph.output[:]
    network.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    with scratch_folder("hybridc-bisect-") as folder:
        path = folder / "model.onnx"
        apart = network.ByteSize() > _EMBEDDED_BYTES
        onnx.save(network, path, save_as_external_data=apart)
        if apart:  # saving has taken the weights out of `network`
            onnx.load_external_data_for_model(network, str(folder))
        yield path
