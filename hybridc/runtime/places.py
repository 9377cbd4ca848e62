"""Where in the arenas of an artifact's chosen plan the arrays of users are."""

from __future__ import annotations

from hybridc.artifact.load import Artifact
from hybridc.ir import Buffer, BufferKind, Device


def tensors(artifact: Artifact) -> dict[str, str]:
    """The tensor behind each input, output and count, by the name that the user knows."""
    manifest = artifact.manifest
    ports = manifest.inputs + manifest.outputs + manifest.counts
    names = artifact.graph.inputs + artifact.graph.outputs
    return {port.name: tensor for port, tensor in zip(ports, names, strict=True)}


def places(artifact: Artifact, device: Device) -> dict[tuple[str, bool], slice]:
    """Where in a device's arena a tensor is before the first step (True) and after the last (False)."""
    end = len(artifact.plan.steps)
    buffers = [b for b in artifact.plan.buffers if b.device is device and b.kind is BufferKind.TENSOR]

    def place(buffer: Buffer) -> slice:
        return slice(buffer.offset_bytes, buffer.end_bytes)

    before = {(b.tensor, True): place(b) for b in buffers if b.first_step < 0}
    return before | {(b.tensor, False): place(b) for b in buffers if b.last_step >= end}
