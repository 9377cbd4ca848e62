"""Inputs and outputs as users know them: names, types and shapes."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from hybridc.artifact.manifest import Manifest, Port
from hybridc.ir.graph import stored_dtype
from hybridc.runtime.descriptions import TYPES, ModelMetadata, NodeArg


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


@functools.cache
def port_dtype(name: str) -> np.dtype:
    """The type of a port's elements, of the package ml_dtypes where numpy has none."""
    if name == "bfloat16" or stored_dtype(name) != name:
        import ml_dtypes  # numpy has no such types

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def node_arg(port: Port, open_axes: dict[int, str]) -> NodeArg:
    """The port as onnxruntime describes it; `open_axes` are names of open dimensions, by axis."""
    return NodeArg(port.name, list(port.shape), f"tensor({TYPES.get(port.dtype, port.dtype)})", open_axes)


def listed(names: Mapping[str, object]) -> str:
    """For messages."""
    return ", ".join(map(repr, names)) or "none"
