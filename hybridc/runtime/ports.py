"""Inputs and outputs as users know them: types, shapes, and what is fed held against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hybridc.artifact.manifest import Manifest, Port
from hybridc.errors import UsageError
from hybridc.ir.graph import stored_dtype
from hybridc.labels import check_labels

_TYPES = {"float32": "float", "float64": "double"}
"""What onnxruntime calls differently than numpy."""


@dataclass(frozen=True, slots=True)
class NodeArg:
    """An input or output as onnxruntime describes it."""

    name: str
    shape: list[int]
    """Of an output whose size follows from data the largest that it can have."""
    type: str
    """For example `tensor(float)`."""


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


def checked_feed(port: Port, feed: np.ndarray) -> np.ndarray:
    """The feed as an array of the port's type, in the machine's byte order.

    Raises UsageError HC553 for another type, HC554 for another shape, HC581 for a wrong label.
    """
    try:
        array = np.asarray(feed)
    except ValueError:
        raise UsageError(
            "HC553", f"input {port.name!r} is not an array", remedy=f"feed {port_type(port)}"
        ) from None
    if array.dtype.name != port.dtype:
        what = f"input {port.name!r} has dtype {array.dtype.name}"
        raise UsageError("HC553", what, remedy=f"feed {port_type(port)}")
    if array.shape != port.shape:
        raise UsageError(
            "HC554", f"input {port.name!r} has shape {list(array.shape)}", remedy=f"feed {port_type(port)}"
        )
    check_labels(port.name, array, port.labels)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_port(data: np.ndarray, port: Port) -> np.ndarray:
    """Bytes, contiguous ones, as the array that a user knows."""
    return data.view(port_dtype(port.dtype)).reshape(port.shape)


def port_dtype(name: str) -> np.dtype:
    """The type of a port's elements, of the package ml_dtypes where numpy has none."""
    if name == "bfloat16" or stored_dtype(name) != name:
        import ml_dtypes  # numpy has no such types

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def node_arg(port: Port) -> NodeArg:
    """The port as onnxruntime describes it."""
    return NodeArg(port.name, list(port.shape), f"tensor({_TYPES.get(port.dtype, port.dtype)})")


def port_type(port: Port) -> str:
    """Such as `float32[1, 3]`."""
    return f"{port.dtype}{list(port.shape)}"


def listed(names: Mapping[str, object]) -> str:
    """For messages."""
    return ", ".join(map(repr, names)) or "none"
