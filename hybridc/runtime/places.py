"""Where in the arenas of an artifact's chosen plan the arrays of users are."""

from __future__ import annotations

from hybridc.artifact.load import Artifact
from hybridc.ir import Buffer, BufferKind, Device


def fed_tensors(artifact: Artifact) -> tuple[dict[str, str], tuple[str, ...]]:
    """The tensor behind each input, by its name, and those of the sizes of open dimensions."""
    inputs, names = artifact.interface.inputs, artifact.graph.inputs
    known = {port.name: tensor for port, tensor in zip(inputs, names, strict=False)}
    return known, tuple(names[len(inputs) :])


def result_tensors(artifact: Artifact) -> dict[str, str]:
    """The tensor behind each output and count, by its name."""
    ports = artifact.interface.outputs + artifact.interface.counts
    return {port.name: tensor for port, tensor in zip(ports, artifact.graph.outputs, strict=True)}


def places(artifact: Artifact, device: Device) -> dict[tuple[str, bool], slice]:
    """Where in a device's arena a tensor is before the first step (True) and after the last (False)."""
    end = len(artifact.plan.steps)
    buffers = [b for b in artifact.plan.buffers if b.device is device and b.kind is BufferKind.TENSOR]

    def place(buffer: Buffer) -> slice:
        return slice(buffer.offset_bytes, buffer.end_bytes)

    before = {(b.tensor, True): place(b) for b in buffers if b.first_step < 0}
    return before | {(b.tensor, False): place(b) for b in buffers if b.last_step >= end}
