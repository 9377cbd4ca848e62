"""What sessions tell of a model and of memory: in the package hybridc-runtime, too, which has no compiler.

It may import nothing of hybridc.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TYPES = {"float32": "float", "float64": "double"}
"""What onnxruntime calls differently than numpy."""


@dataclass(frozen=True, slots=True)
class NodeArg:
    """An input or output as onnxruntime describes it."""

    name: str
    shape: list[int]
    """Of an output whose size follows from data, and of open dimensions, the largest that there can be."""
    type: str
    """For example `tensor(float)`."""
    open: dict[int, str] = field(default_factory=dict)
    """Names of open dimensions, by axis."""

    def __str__(self) -> str:
        extents = (self.open.get(axis, str(extent)) for axis, extent in enumerate(self.shape))
        return f"{self.name} [{', '.join(extents)}]"


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What is known of a model, under onnxruntime's names; what is not, is empty."""

    producer_name: str
    graph_name: str
    """The name of the model's file."""
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]
    """`source_sha256` and `opset` of the model, `target`, versions of `hybridc`, `tvm` and `tvm_ffi`."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device: what the plan promised, and what was allocated."""

    planned_bytes: int
    allocated_bytes: int
    mapped_weight_bytes: int = 0
    """Weights in their file; pages of those that are read in a run are loaded when used."""
    staging_bytes: int = 0
    """Pinned memory beside the arena, from which streamed weights are copied to the GPU."""


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """What a run takes whose sizes are in one bucket."""

    sizes: dict[str, tuple[int, int]]
    """The smallest and the largest of each open dimension, by name."""
    gpu_bytes: int
    """Of the plan's arena. The session's holds the plan of any bucket."""
    cpu_bytes: int
    predicted_us: float
