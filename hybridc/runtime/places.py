"""Where in the arenas of an artifact's chosen plan the arrays of users are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridc.artifact.load import Artifact
from hybridc.artifact.manifest import Port, joined_axis
from hybridc.ir import Buffer, BufferKind, Device, Graph


@dataclass(frozen=True, slots=True)
class PortTensor:
    """A tensor that is an input or output of the model, or a part of one."""

    name: str
    port: Port
    """As users know it, of the part alone."""
    axis: int = 0
    begin: int = 0
    """Where the part begins along this axis."""

    def of(self, array: np.ndarray) -> np.ndarray:
        """The part of an array that is fed, which may have smaller sizes along other axes."""
        before = (slice(None),) * self.axis
        return array[(*before, slice(self.begin, self.begin + self.port.shape[self.axis]))]


def fed_tensors(artifact: Artifact) -> tuple[dict[str, tuple[PortTensor, ...]], tuple[str, ...]]:
    """The tensors of each input, by its name, and those of the sizes of open dimensions."""
    ports, graph = artifact.interface.inputs, artifact.graph
    known = graph.ports(graph.inputs)
    fed = zip(ports, known, strict=False)
    sizes = tuple(name for names in known[len(ports) :] for name in names)
    return {port.name: _port_tensors(port, names, graph) for port, names in fed}, sizes


def result_tensors(artifact: Artifact) -> dict[str, tuple[PortTensor, ...]]:
    """The tensors of each output and count, by its name."""
    ports, graph = artifact.interface.outputs + artifact.interface.counts, artifact.graph
    results = zip(ports, graph.ports(graph.outputs), strict=True)
    return {port.name: _port_tensors(port, names, graph) for port, names in results}


def _port_tensors(port: Port, names: Sequence[str], graph: Graph) -> tuple[PortTensor, ...]:
    if len(names) == 1:
        return (PortTensor(names[0], port),)
    shapes = [graph.tensor[name].shape for name in names]
    axis = joined_axis(port.shape, shapes)
    begins = [sum(shape[axis] for shape in shapes[:number]) for number in range(len(shapes))]
    parts = zip(names, shapes, begins, strict=True)
    return tuple(PortTensor(name, replace(port, shape=shape), axis, begin) for name, shape, begin in parts)


def places(artifact: Artifact, device: Device) -> dict[tuple[str, bool], slice]:
    """Where in a device's arena a tensor is before the first step (True) and after the last (False)."""
    end = len(artifact.plan.steps)
    buffers = [b for b in artifact.plan.buffers if b.device is device and b.kind is BufferKind.TENSOR]

    def place(buffer: Buffer) -> slice:
        return slice(buffer.offset_bytes, buffer.end_bytes)

    before = {(b.tensor, True): place(b) for b in buffers if b.first_step < 0}
    return before | {(b.tensor, False): place(b) for b in buffers if b.last_step >= end}
