"""Inputs and outputs as users know them: names, types and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hybridc.artifact.manifest import Manifest, Port
from hybridc.ir.graph import stored_dtype

_TYPES = {"float32": "float", "float64": "double"}
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
    """What an artifact knows of its model, under onnxruntime's names; what it does not know is empty."""

    producer_name: str
    graph_name: str
    """The name of the model's file."""
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]
    """`source_sha256` and `opset` of the model, `target`, versions of `hybridc`, `tvm` and `tvm_ffi`."""


def model_metadata(manifest: Manifest) -> ModelMetadata:
    """Of an artifact with this manifest."""
    source, versions = manifest.source, manifest.versions
    known = {
        "source_sha256": source.sha256,
        "opset": str(source.opset),
        "target": manifest.target,
        "hybridc": versions.hybridc,
        "tvm": versions.tvm,
        "tvm_ffi": versions.tvm_ffi,
    }
    return ModelMetadata("hybridc", source.name, "", "", "", 0, known)


def as_port(data: np.ndarray, port: Port) -> np.ndarray:
    """Bytes, contiguous ones, as the array that a user knows."""
    return data.view(port_dtype(port.dtype)).reshape(port.shape)


def port_dtype(name: str) -> np.dtype:
    """The type of a port's elements, of the package ml_dtypes where numpy has none."""
    if name == "bfloat16" or stored_dtype(name) != name:
        import ml_dtypes  # numpy has no such types

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def node_arg(port: Port, open_axes: dict[int, str]) -> NodeArg:
    """The port as onnxruntime describes it; `open_axes` are names of open dimensions, by axis."""
    return NodeArg(port.name, list(port.shape), f"tensor({_TYPES.get(port.dtype, port.dtype)})", open_axes)


def listed(names: Mapping[str, object]) -> str:
    """For messages."""
    return ", ".join(map(repr, names)) or "none"
