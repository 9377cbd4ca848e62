"""manifest.json: what an artifact holds, what it needs, and how to check it. No TVM inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from hybridc.errors import UsageError
from hybridc.ir import Device
from hybridc.ir.bind import Parameter, Signatures, Weight
from hybridc.ir.graph import dtype_from_json, port_dtype_from_json
from hybridc.json_values import (
    JsonValueError,
    count,
    each,
    hexadecimal,
    mapping,
    member,
    microseconds,
    optional,
    sealed,
    shape,
    shared,
    size,
    text,
    whole,
)
from hybridc.labels import Labels
from hybridc.machine import Machine, machine_from_json, machine_to_json
from hybridc.sizes import Interval
from hybridc.targets import is_architecture

FORMAT = "hybridc-artifact"
SCHEMA_VERSION = 12
MANIFEST = "manifest.json"
TRAINING_MANIFEST = "training.json"
"""Of a folder that holds several artifacts, those of a training step."""
PLAN = "plan.json"
LIBRARY = "library.so"
CUDA_SOURCE = "kernels.cu"
WEIGHTS = "weights.bin"
LARGEST_JSON_BYTES = 1 << 28
"""Of manifest.json and plan.json each: a thousand times those of resnet50, and parsed in a minute."""
WEIGHT_ALIGNMENT_BYTES = 64
"""A cache line, and what TVM's kernels assume of a buffer."""


@dataclass(frozen=True, slots=True)
class Cut:
    """An axis of an output of which data determine how many elements there are: the first ones count."""

    axis: int
    count: int
    """Which of `Manifest.counts` says how many."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output as the user knows it; each graph has its tensor at the same position."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    labels: tuple[Labels, ...] = ()
    """Of an input, what losses take its values as."""
    cuts: tuple[Cut, ...] = ()
    """Of an output, axes of which `shape` has only the bound."""


def joined_axis(shape: tuple[int, ...], parts: Sequence[tuple[int, ...]]) -> int:
    """The axis along which tensors of these shapes together have the shape of a port.

    Raises ValueError if there is none.
    """
    for axis, extent in enumerate(shape):
        others = {(*part[:axis], *part[axis + 1 :]) for part in parts}
        if others == {(*shape[:axis], *shape[axis + 1 :])} and sum(p[axis] for p in parts) == extent:
            return axis
    raise ValueError("parts of an input or output are not what it is")


@dataclass(frozen=True, slots=True)
class OpenDimension:
    """A dimension whose size is known when a run begins."""

    name: str
    axes: tuple[tuple[str, int], ...]
    """Inputs that have it, and their axes."""


@dataclass(frozen=True, slots=True)
class Interface:
    """What a graph takes and gives, for one bucket of sizes."""

    sizes: tuple[Interval, ...]
    """Of each open dimension; shapes are those of the largest. Behind the inputs a graph has one more for
    each, int64[1], the size of a run."""
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    counts: tuple[Port, ...]
    """Single int64 numbers, by which outputs are cut; a graph's results behind `outputs`."""


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
    layout: int
    """0 as the model has it, else how it is packed, as `Parameter.layout`."""
    arena_offset_bytes: int | None = None
    """Where it is uploaded to in the GPU's arena; None for weights that stay on the host."""

    @property
    def weight(self) -> Weight:
        """What it is to the kernels that read it."""
        return Weight(self.tensor, self.layout, self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class StoredFunction:
    """A function of the library, and what it is called with."""

    name: str
    device: Device
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """What a run of one plan needs. Weights that several plans read are stored once."""

    host_weights: tuple[StoredWeight, ...]
    """What CPU kernels read, and weights that are outputs."""
    streamed_weights: tuple[StoredWeight, ...]
    """Copied to the GPU during a run."""
    gpu_weights: tuple[StoredWeight, ...]
    """Copied into the GPU's arena at load."""
    pins: Mapping[str, Device]
    """Devices that the user gave kernels of the plan's graph."""
    bucket: int = 0
    """Which of `Manifest.interfaces` it is for."""
    instruction_set: int = 0
    """Which of `Manifest.instruction_sets` it is for."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of the packages that wrote the artifact; the same TVM must load it."""

    hybridc: str
    tvm: str
    tvm_ffi: str


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What the CPU's code of some plans is made for."""

    name: str
    cpu_flags: tuple[str, ...]
    """Flags of /proc/cpuinfo that a processor must have."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything but plans, code and weights."""

    versions: Versions
    target: str
    instruction_sets: tuple[InstructionSet, ...]
    """Of the CPU, the richest last: one, or several with plans for each."""
    cuda_architectures: tuple[str, ...]
    threads: int | None
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    source: Source
    machine: Machine
    """What the plan was made for, times that were measured or estimated included."""
    host_memory_bytes: int | None
    """What a run may hold of the host's memory; None: what there is."""
    functions: tuple[StoredFunction, ...]
    """All of the library that plans run."""
    plans: tuple[StoredPlan, ...]
    """As in plan.json."""
    cuda_image_key: str | None
    cuda_image_bytes: int | None
    """Of the GPU's code for all architectures, inside of the library; None without any."""
    files: tuple[StoredFile, ...]
    counts: tuple[Port, ...] = ()
    """Single int64 numbers, by which outputs are cut; the graphs' results behind `outputs`."""
    dimensions: tuple[OpenDimension, ...] = ()
    buckets: tuple[Interface, ...] = ()
    """If there are open dimensions: one for each bucket of sizes, that of the largest sizes, whose `inputs`,
    `outputs` and `counts` stand above, last."""

    @property
    def cpu_flags(self) -> tuple[str, ...]:
        """Flags of /proc/cpuinfo that the richest instruction set needs."""
        return self.instruction_sets[-1].cpu_flags

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """One for each bucket, or a single one."""
        return self.buckets or (Interface((), self.inputs, self.outputs, self.counts),)

    @property
    def signatures(self) -> Signatures:
        """The parameters of each function."""
        return {(f.name, f.device): f.parameters for f in self.functions}


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as plain JSON values, sealed; `manifest_from_json` is its inverse."""
    data = asdict(replace(manifest, machine=None))  # type: ignore[arg-type]
    content = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        **data,
        "machine": machine_to_json(manifest.machine),
        "measured_us": _times_to_json(manifest.machine.measured_us),
        "estimated_us": _times_to_json(manifest.machine.estimated_us),
    }
    return sealed(content)


def _times_to_json(times: Mapping[tuple[str, Device], float]) -> list[dict[str, Any]]:
    return [
        {"function": function, "device": device.value, "us": us} for (function, device), us in times.items()
    ]


def manifest_from_json(data: Any) -> Manifest:
    """Read a manifest back. Raises JsonValueError, a ValueError, on anything that is not one."""
    return Manifest(
        versions=member(data, "versions", _versions),
        target=member(data, "target", text),
        instruction_sets=member(data, "instruction_sets", each(_instruction_set)),
        cuda_architectures=member(data, "cuda_architectures", each(_architecture)),
        threads=member(data, "threads", optional(count)),
        inputs=member(data, "inputs", each(_port)),
        outputs=member(data, "outputs", each(_port)),
        source=member(data, "source", _source),
        machine=replace(
            member(data, "machine", _machine),
            measured_us=dict(member(data, "measured_us", each(_time))),
            estimated_us=dict(member(data, "estimated_us", each(_time))),
        ),
        host_memory_bytes=member(data, "host_memory_bytes", optional(count)),
        functions=member(data, "functions", each(partial(_function, parameter=shared(_parameter)))),
        plans=member(data, "plans", each(partial(_plan, weight=shared(_weight)))),
        cuda_image_key=member(data, "cuda_image_key", optional(hexadecimal(16))),
        cuda_image_bytes=member(data, "cuda_image_bytes", optional(count)),
        files=member(data, "files", each(_file)),
        counts=member(data, "counts", each(_port)),
        dimensions=member(data, "dimensions", each(_dimension)),
        buckets=member(data, "buckets", each(_interface)),
    )


def _dimension(data: Any) -> OpenDimension:
    return OpenDimension(member(data, "name", text), member(data, "axes", each(_axis)))


def _axis(data: Any) -> tuple[str, int]:
    name, axis = each(lambda value: value)(data)
    return text(name), size(axis)


def _interface(data: Any) -> Interface:
    ports = (member(data, name, each(_port)) for name in ("inputs", "outputs", "counts"))
    return Interface(member(data, "sizes", each(_interval)), *ports)


def _interval(data: Any) -> Interval:
    return Interval(member(data, "low", size), member(data, "high", size))


def _versions(data: Any) -> Versions:
    return Versions(*(member(data, key, text) for key in ("hybridc", "tvm", "tvm_ffi")))


def _instruction_set(data: Any) -> InstructionSet:
    return InstructionSet(member(data, "name", text), member(data, "cpu_flags", each(text)))


def _architecture(data: Any) -> str:
    name = text(data)
    if not is_architecture(name):
        raise JsonValueError(f"{name!r} is not a CUDA architecture")
    return name


def _source(data: Any) -> Source:
    return Source(member(data, "name", text), member(data, "sha256", text), member(data, "opset", count))


def _port(data: Any) -> Port:
    return Port(
        name=member(data, "name", text),
        shape=member(data, "shape", shape),
        dtype=member(data, "dtype", port_dtype_from_json),
        labels=member(data, "labels", each(_labels)),
        cuts=member(data, "cuts", each(_cut)),
    )


def _cut(data: Any) -> Cut:
    return Cut(member(data, "axis", size), member(data, "count", size))


def _labels(data: Any) -> Labels:
    return Labels(member(data, "classes", count), member(data, "ignored", optional(whole)))


def _machine(data: Any) -> Machine:
    try:
        return machine_from_json(data, MANIFEST)
    except UsageError as error:
        raise JsonValueError(str(error)) from None


def _time(data: Any) -> tuple[tuple[str, Device], float]:
    key = member(data, "function", text), member(data, "device", Device)
    return key, member(data, "us", microseconds)


def _function(data: Any, parameter: Callable[[Any], Parameter]) -> StoredFunction:
    device = member(data, "device", Device)
    return StoredFunction(member(data, "name", text), device, member(data, "parameters", each(parameter)))


def _parameter(data: Any) -> Parameter:
    return Parameter(
        shape=member(data, "shape", shape),
        dtype=member(data, "dtype", dtype_from_json),
        layout=member(data, "layout", count),
    )


def _plan(data: Any, weight: Callable[[Any], StoredWeight]) -> StoredPlan:
    return StoredPlan(
        host_weights=member(data, "host_weights", each(weight)),
        streamed_weights=member(data, "streamed_weights", each(weight)),
        gpu_weights=member(data, "gpu_weights", each(weight)),
        pins=member(data, "pins", mapping(Device)),
        bucket=member(data, "bucket", size),
        instruction_set=member(data, "instruction_set", size),
    )


def _weight(data: Any) -> StoredWeight:
    return StoredWeight(
        tensor=member(data, "tensor", text),
        dtype=member(data, "dtype", dtype_from_json),
        shape=member(data, "shape", shape),
        offset_bytes=member(data, "offset_bytes", size),
        size_bytes=member(data, "size_bytes", size),
        layout=member(data, "layout", count),
        arena_offset_bytes=member(data, "arena_offset_bytes", optional(size)),
    )


def _file(data: Any) -> StoredFile:
    name, digest = member(data, "name", text), member(data, "sha256", hexadecimal(64))
    return StoredFile(name, member(data, "size_bytes", size), digest)
