"""A network exported by torch: which exporter, opset and precision, and whether its dimensions are open."""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from tests.exports.architecture import Architecture, randomized
from tests.exports.families.detection import TRANSLATIONS
from tests.exports.table import ARCHITECTURES

OPSETS = {"dynamo": (18, 23), "script": (17, 20)}
"""The oldest and newest that is drawn for an exporter: what it can write without a conversion."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to export an architecture."""

    architecture: str
    exporter: str
    """`dynamo` or `script`, the older one that traces."""
    form: str
    """`fixed`, `dynamic` or, with fixed dimensions, `half`."""

    def __str__(self) -> str:
        return f"{self.architecture}/{self.exporter}/{self.form}"

    @property
    def opset(self) -> int:
        """Drawn from the name, so that all are met."""
        first, last = OPSETS[self.exporter]
        wanted = ARCHITECTURES[self.architecture].opset
        if wanted is not None:
            return min(wanted, last)
        return first + zlib.crc32(str(self).encode()) % (last - first + 1)


VARIANTS: Mapping[str, Variant] = {
    str(variant): variant
    for architecture in ARCHITECTURES
    for exporter in OPSETS
    for form in ("fixed", "dynamic", "half")
    for variant in [Variant(architecture, exporter, form)]
}


class NotExported(Exception):
    """torch or onnxruntime cannot do it: nothing that hybridc could compile."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A model, what it is fed, and what it gives in float32 for the weights and inputs as it has them."""

    model: onnx.ModelProto
    feeds: Mapping[str, np.ndarray]
    exact: tuple[np.ndarray, ...]


def kept(variant: Variant, folder: Path | None) -> Exported:
    """As `exported`, from the folder if it has been there before. Raises NotExported."""
    if folder is None:
        return exported(variant)
    path = folder / f"{str(variant).replace('/', '__')}.pkl"
    if path.exists():
        return pickle.loads(path.read_bytes())
    network = exported(variant)
    path.write_bytes(pickle.dumps(network))
    return network


def exported(variant: Variant) -> Exported:
    """Raises NotExported."""
    architecture = ARCHITECTURES[variant.architecture]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.manual_seed(0)
            module = randomized(architecture.module())
            model = _model(variant, architecture, module)
        except Exception as error:
            lines = re.sub(r"\x1b\[\d+m", "", str(error)).strip().splitlines() or [""]
            raise NotExported(f"{type(error).__name__}: {lines[0]}"[:300]) from error
        open_dims = variant.form == "dynamic"
        inputs = _inputs(architecture, position=int(open_dims))
        if variant.form == "half":
            inputs = _cast(inputs, torch.float16)
            module = module.half()
        feeds = {name: tensor.numpy() for name, tensor in inputs.items() if _has(model, name)}
        with torch.no_grad():
            results = module.float()(*_cast(inputs, torch.float32).values())
    exact = results if isinstance(results, tuple) else (results,)
    return Exported(model, feeds, tuple(tensor.numpy() for tensor in exact))


def _model(variant: Variant, architecture: Architecture, module: nn.Module) -> onnx.ModelProto:
    inputs = _inputs(architecture, position=0)
    if variant.form == "half":
        module, inputs = module.half(), _cast(inputs, torch.float16)
    names = list(inputs)
    target: Any = io.BytesIO()  # of which torch's annotations know nothing
    common: dict[str, Any] = {"input_names": names, "opset_version": variant.opset}
    if variant.exporter == "script":
        axes = _open_axes(architecture) if variant.form == "dynamic" else None
        torch.onnx.export(module, tuple(inputs.values()), target, dynamo=False, dynamic_axes=axes, **common)
        return onnx.load_from_string(target.getvalue())
    shapes = None
    if variant.form == "dynamic":
        open_axes = _open_axes(architecture)
        shapes = tuple(open_axes.get(name, {}) for name in names)
    program = torch.onnx.export(
        module,
        tuple(inputs.values()),
        dynamo=True,
        verbose=False,
        custom_translation_table=TRANSLATIONS,
        dynamic_shapes=_nested(module, shapes),
        **common,
    )
    assert program is not None
    return program.model_proto


def _nested(module: nn.Module, shapes: tuple[dict[int, str], ...] | None) -> tuple[Any, ...] | None:
    """As the signature of `forward` has the operands: `*operands` are one tuple, unless there are none."""
    if shapes is None:
        return None
    code = module.forward.__code__  # type: ignore[attr-defined]
    is_variadic = bool(code.co_flags & 0x04)
    count = code.co_argcount - 1
    return (*shapes[:count], shapes[count:]) if is_variadic and shapes[count:] else shapes


def _inputs(architecture: Architecture, *, position: int) -> dict[str, Tensor]:
    sizes = {name: both[position] for name, both in architecture.sizes.items()}
    return {name: fed.drawn(name, sizes) for name, fed in architecture.inputs.items()}


def _open_axes(architecture: Architecture) -> dict[str, dict[int, str]]:
    return {
        name: {axis: dim for axis, dim in enumerate(fed.dims) if isinstance(dim, str)}
        for name, fed in architecture.inputs.items()
    }


def _cast(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}


def _has(model: onnx.ModelProto, name: str) -> bool:
    """An exporter drops inputs that nothing uses."""
    return any(value.name == name for value in model.graph.input)
