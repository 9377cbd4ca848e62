"""Networks that onnxruntime's static quantiser wrote: QuantizeLinear and DequantizeLinear around int8."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx

from drawn.case import Case, even
from hybridc.models.bert import bert
from hybridc.models.resnet import resnet

TOLERANCE = 0.1
"""A value near the middle of two steps may become either, and later layers spread that."""
BUILDERS = {"resnet": resnet, "bert": bert}


def draw_quantized(rng: np.random.Generator) -> Case:
    """A residual network or a transformer of random size."""
    if rng.integers(2):
        depth, size = int(rng.choice([18, 34, 50])), even(rng, 128, 320, 32)
        return quantized(f"resnet{depth} {size} pixels", "resnet", depth=depth, size=size)
    width, heads = int(rng.choice([32, 64])), int(rng.choice([4, 6, 8, 12]))
    tokens, layers = even(rng, 32, 384), int(rng.integers(2, 7))
    name = f"bert {tokens} tokens, {heads} heads of {width}, {layers} layers"
    return quantized(name, "bert", tokens=tokens, hidden=heads * width, heads=heads, layers=layers)


def quantized(name: str, model: str, **parameters: int) -> Case:
    """A model of the suite behind the quantiser."""
    return Case(
        f"quantized {name}",
        lambda: _quantize(BUILDERS[model](**parameters)),
        targets={"avx512": "avx512_vnni"},
        tolerance=TOLERANCE,
    )


def _quantize(model: onnx.ModelProto) -> onnx.ModelProto:
    from tests.variants.tools import statically

    with tempfile.TemporaryDirectory(prefix="hybridc-bench-") as folder:
        return statically(model, Path(folder), "QDQ", "QUInt8", "QInt8", per_channel=True)
