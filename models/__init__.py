"""Real networks as ONNX models with seeded random weights: nothing to download, the same bytes always."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from hybridc.models.alexnet import alexnet
from hybridc.models.atacworks import atacworks
from hybridc.models.bert import bert
from hybridc.models.builder import require, without_weights
from hybridc.models.cifar_quick import cifar_quick
from hybridc.models.encoder import encoder
from hybridc.models.googlenet import googlenet
from hybridc.models.lenet import lenet
from hybridc.models.llama import llama
from hybridc.models.mlp import mlp
from hybridc.models.mobilenet_v2 import mobilenet_v2
from hybridc.models.resnet import resnet
from hybridc.models.super_resolution import super_resolution
from hybridc.models.unet import unet
from hybridc.models.vgg import vgg
from hybridc.models.vit import vit

ModelBuilder = Callable[..., onnx.ModelProto]
"""A function of keyword parameters that all have defaults: those of the published network."""

MODELS: dict[str, ModelBuilder] = {
    "mlp": mlp,
    "lenet": lenet,
    "cifar_quick": cifar_quick,
    "alexnet": alexnet,
    "resnet": resnet,
    "resnet18": partial(resnet, depth=18),
    "resnet50": partial(resnet, depth=50),
    "resnet152": partial(resnet, depth=152),
    "vgg": vgg,
    "vgg11": partial(vgg, depth=11),
    "vgg16": partial(vgg, depth=16),
    "googlenet": googlenet,
    "mobilenet_v2": mobilenet_v2,
    "unet": unet,
    "bert": bert,
    "encoder": encoder,
    "llama": llama,
    "llama_7b": partial(
        llama, context=4096, layers=32, hidden=4096, heads=32, kv_heads=32, feed_forward=11008
    ),
    "vit": vit,
    "vit_b16": partial(vit, patch=16, width=768, depth=12),
    "atacworks": atacworks,
    "super_resolution": super_resolution,
}

_EXTERNAL_DATA_BYTES = 1_500_000_000
"""Weights beyond this leave the model file: a protobuf message ends at 2^31 bytes."""


def names() -> tuple[str, ...]:
    """The models there are."""
    return tuple(MODELS)


def parameters(name: str) -> dict[str, Any]:
    """Parameters of a model and their defaults. Raises UsageError HC502 if there is no such model."""
    return {p.name: p.default for p in inspect.signature(_find(name)).parameters.values()}


def describe(name: str) -> str:
    """One line on a model. Raises UsageError HC502 if there is no such model."""
    builder = _find(name)
    if isinstance(builder, partial):
        return f"{builder.func.__name__} with {', '.join(f'{k} {v}' for k, v in builder.keywords.items())}"
    return inspect.cleandoc(builder.__doc__ or "").partition("\n")[0]


def build(name: str, /, **arguments: Any) -> onnx.ModelProto:
    """Build a model. Raises UsageError HC502 if there is no such model or parameter, or no such network."""
    builder, known = _find(name), parameters(name)
    for argument, value in arguments.items():
        require(argument in known, f"{name} has no parameter {argument!r}", _suggest(argument, known))
        _check_value(
            f"{name}: {argument}", value, type(known[argument]), minimum=0 if argument == "seed" else 1
        )
    return builder(**arguments)


def export(
    name: str, path: str | Path, /, *, external_data: bool = False, weights: bool = True, **arguments: Any
) -> Path:
    """Build a model and write it to `path`, which is returned.

    With `external_data`, or when the weights are too large for a protobuf, they go to one file
    beside it, `path` with `.data` appended. Without `weights` none are drawn, and there is no such file: the
    model can be planned, but not compiled. Raises UsageError HC502 like `build`, and OSError.
    """
    path = Path(path)
    if not weights:
        return _export_shapes(name, path, arguments)
    model = build(name, **arguments)
    if external_data or sum(len(t.raw_data) for t in model.graph.initializer) > _EXTERNAL_DATA_BYTES:
        data = path.with_name(path.name + ".data")
        data.unlink(missing_ok=True)  # onnx would append to it, or refuse
        onnx.save_model(
            model, path, save_as_external_data=True, all_tensors_to_one_file=True, location=data.name
        )
    else:
        onnx.save_model(model, path)
    return path


def _export_shapes(name: str, path: Path, arguments: dict[str, Any]) -> Path:
    with without_weights():
        path.write_bytes(build(name, **arguments).SerializeToString())
    return path


def _find(name: str) -> ModelBuilder:
    require(name in MODELS, f"there is no model {name!r}", _suggest(name, MODELS))
    return MODELS[name]


def _check_value(what: str, value: object, expected: type, minimum: int) -> None:
    """Integers count something; the one float multiplies widths and need only be positive."""
    if expected is float:
        positive = isinstance(value, int | float) and 0 < value < math.inf
        require(positive, f"{what} is {value!r}, not a positive number")
    elif expected is bool:
        require(isinstance(value, bool), f"{what} is {value!r}, not true or false")
    else:
        integer = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        require(integer, f"{what} is {value!r}, not an integer from {minimum} on")


def _suggest(name: str, known: dict[str, Any]) -> str:
    """Close matches, or else all there is."""
    return f"try {', '.join(difflib.get_close_matches(name, known) or known)}"
