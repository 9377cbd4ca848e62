"""The frontend's result: a Relax function, and the ONNX nodes of each of its bindings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import tvm

from hybridc.labels import Labels


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """An input or output of the model."""

    name: str
    """The user's own name."""
    variable: str
    """Its variable in the Relax function: a safe identifier."""
    shape: tuple[int, ...]
    dtype: str
    """Name of the numpy dtype, or of that of the package ml_dtypes."""
    labels: tuple[Labels, ...] = ()
    """Of an input, what losses take its values as."""
    cuts: tuple[tuple[int, int], ...] = ()
    """Of an output, axes of which `shape` has the bound, and which of `ImportedModel.counts` says how many
    elements there are."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The file that the model was read from."""

    name: str
    """File name, `<bytes>` or `<ModelProto>`."""
    sha256: str
    """Of the file without its external data."""
    ir_version: int
    opset: int
    producer: str


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """One Relax function `main` and all that belongs to it.

    `main` is a single dataflow block of normalised bindings; its parameters are the inputs and then
    the weights that are used; constants inside are scalars. It returns a tuple of variables, one for
    each output of the model and each count, in order and possibly the same twice.
    """

    module: tvm.IRModule
    weights: Mapping[str, np.ndarray]
    """By parameter name, tied weights once. They may be memory maps of the model's files, or views
    with zero strides where the model asks for a constant array: do not assume contiguous memory."""
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    origins: Mapping[str, tuple[str, ...]]
    """Names of the ONNX nodes that each binding's variable was made from."""
    source: ModelFile
    parameters: Mapping[str, np.ndarray] = field(default_factory=dict)
    """For training: values of the weights that are inputs instead, after the model's own, by their names in
    the file; running statistics of BatchNorm among them."""
    counts: tuple[ValueInfo, ...] = ()
    """Results of `main` behind `outputs`: single int64 numbers, by which outputs are cut."""
    sizes: tuple[ValueInfo, ...] = ()
    """Parameters of `main` behind `inputs`: single int64 numbers, the sizes of open dimensions."""
    loop_carried: tuple[tuple[int, int], ...] = ()
    """For training: positions of inputs, and of the outputs that the next run takes in their places."""
