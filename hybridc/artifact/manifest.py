"""manifest.json: what an artifact holds, what it needs, and how to check it. No TVM inside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hybridc.errors import UsageError
from hybridc.ir import Device
from hybridc.ir.json_values import as_count, as_list, as_number, as_object, as_text
from hybridc.machine import Machine, machine_from_json, machine_to_json

FORMAT = "hybridc-artifact"
SCHEMA_VERSION = 4
MANIFEST = "manifest.json"
TRAINING_MANIFEST = "training.json"
"""Of a folder that holds several artifacts, those of a training step."""
PLAN = "plan.json"
LIBRARY = "library.so"
CUDA_SOURCE = "kernels.cu"
WEIGHTS = "weights.bin"
WEIGHT_ALIGNMENT_BYTES = 64
"""A cache line, and what TVM's kernels assume of a buffer."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output as the user knows it; each graph has its tensor at the same position."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Source:
    """The model that was compiled."""

    name: str
    sha256: str
    opset: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the artifact as it was written."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight in weights.bin, as the kernels that read it expect it."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    """After packing."""
    offset_bytes: int
    size_bytes: int
    packed: bool
    arena_offset_bytes: int | None = None
    """Where it is uploaded to in the GPU's arena; None for weights that stay on the host."""


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """What the library's functions for one plan need. Weights that several plans read are stored once."""

    event_count: int
    host_weights: tuple[StoredWeight, ...]
    """In the order of the parameters of the CPU's function."""
    streamed_weights: tuple[StoredWeight, ...]
    """Copied to the GPU during a run, in the order of the parameters of the function for these copies."""
    gpu_weights: tuple[StoredWeight, ...]
    """Copied into the GPU's arena at load."""
    pins: Mapping[str, Device]
    """Devices that the user gave kernels of the plan's graph."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of the packages that wrote the artifact; the same TVM must load it."""

    hybridc: str
    tvm: str
    tvm_ffi: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything but plans, code and weights."""

    versions: Versions
    target: str
    cpu_flags: tuple[str, ...]
    cuda_architectures: tuple[str, ...]
    threads: int | None
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    source: Source
    machine: Machine
    """What the plan was made for, times that were measured included."""
    host_memory_bytes: int | None
    """What a run may hold of the host's memory; None: what there is."""
    plans: tuple[StoredPlan, ...]
    """As in plan.json."""
    cuda_image_key: str | None
    files: tuple[StoredFile, ...]


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as plain JSON values; `manifest_from_json` is its inverse."""
    data = asdict(replace(manifest, machine=None))  # type: ignore[arg-type]
    measured_us = manifest.machine.measured_us
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        **data,
        "machine": machine_to_json(manifest.machine),
        "measured_us": [
            {"function": function, "device": device.value, "us": us}
            for (function, device), us in measured_us.items()
        ],
    }


def manifest_from_json(data: dict[str, Any]) -> Manifest:
    """Read a manifest back. Raises KeyError, TypeError or ValueError on anything that is not one."""
    key = data["cuda_image_key"]
    threads, host_memory = data["threads"], data["host_memory_bytes"]
    return Manifest(
        versions=Versions(*(as_text(data["versions"][k]) for k in ("hybridc", "tvm", "tvm_ffi"))),
        target=as_text(data["target"]),
        cpu_flags=_texts(data["cpu_flags"]),
        cuda_architectures=_texts(data["cuda_architectures"]),
        threads=None if threads is None else as_count(threads),
        inputs=tuple(_port(p) for p in as_list(data["inputs"])),
        outputs=tuple(_port(p) for p in as_list(data["outputs"])),
        source=Source(
            as_text(data["source"]["name"]),
            as_text(data["source"]["sha256"]),
            as_count(data["source"]["opset"]),
        ),
        machine=_machine(data["machine"], data["measured_us"]),
        host_memory_bytes=None if host_memory is None else as_count(host_memory),
        plans=tuple(_plan(p) for p in as_list(data["plans"])),
        cuda_image_key=None if key is None else _hexadecimal(key, 16),
        files=tuple(_file(f) for f in as_list(data["files"])),
    )


def _port(data: dict[str, Any]) -> Port:
    return Port(as_text(data["name"]), _shape(data["shape"]), as_text(data["dtype"]))


def _machine(data: Any, measured: object) -> Machine:
    try:
        machine = machine_from_json(data, MANIFEST)
    except UsageError as error:
        raise ValueError(str(error)) from None
    times_us = {
        (as_text(m["function"]), Device(as_text(m["device"]))): as_number(m["us"]) for m in as_list(measured)
    }
    return replace(machine, measured_us=times_us)


def _plan(data: dict[str, Any]) -> StoredPlan:
    return StoredPlan(
        event_count=as_count(data["event_count"]),
        host_weights=tuple(_weight(w) for w in as_list(data["host_weights"])),
        streamed_weights=tuple(_weight(w) for w in as_list(data["streamed_weights"])),
        gpu_weights=tuple(_weight(w) for w in as_list(data["gpu_weights"])),
        pins={kernel: Device(as_text(device)) for kernel, device in as_object(data["pins"]).items()},
    )


def _weight(data: dict[str, Any]) -> StoredWeight:
    arena_offset = data["arena_offset_bytes"]
    if not isinstance(data["packed"], bool):
        raise TypeError(f"packed is {data['packed']!r}")
    return StoredWeight(
        tensor=as_text(data["tensor"]),
        dtype=as_text(data["dtype"]),
        shape=_shape(data["shape"]),
        offset_bytes=as_count(data["offset_bytes"]),
        size_bytes=as_count(data["size_bytes"]),
        packed=data["packed"],
        arena_offset_bytes=None if arena_offset is None else as_count(arena_offset),
    )


def _file(data: dict[str, Any]) -> StoredFile:
    return StoredFile(as_text(data["name"]), as_count(data["size_bytes"]), _hexadecimal(data["sha256"], 64))


def _hexadecimal(value: object, digits: int) -> str:
    text = as_text(value)
    if not re.fullmatch(f"[0-9a-f]{{{digits}}}", text):
        raise ValueError(f"{text!r} is not a hexadecimal number of {digits} digits")
    return text


def _texts(values: object) -> tuple[str, ...]:
    return tuple(as_text(v) for v in as_list(values))


def _shape(values: object) -> tuple[int, ...]:
    return tuple(as_count(v) for v in as_list(values))
