"""What onnxruntime's tools make of a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

quantization = pytest.importorskip("onnxruntime.quantization")
nbits = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
bnb4 = pytest.importorskip("onnxruntime.quantization.matmul_bnb4_quantizer")
transformers = pytest.importorskip("onnxruntime.transformers.optimizer")
float16 = pytest.importorskip("onnxruntime.transformers.float16")

Tool = Callable[[onnx.ModelProto, Path], onnx.ModelProto]
"""Makes a network of a network, with files in a folder. The first one may be changed."""

_LEVELS = onnxruntime.GraphOptimizationLevel


def fed(model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    """Random inputs: integers are words of a small vocabulary, or the two numbers of a mask."""
    random = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape, dtype = (
            [dim.dim_value for dim in kind.shape.dim],
            onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type),
        )
        if dtype.kind == "f":
            feeds[value.name] = random.standard_normal(shape).astype(dtype)
        else:
            highest = 2 if any(word in value.name for word in ("mask", "type")) else 50
            feeds[value.name] = random.integers(0, highest, shape).astype(dtype)
    return feeds


class _Calibration(quantization.CalibrationDataReader):  # type: ignore[misc,name-defined]
    def __init__(self, model: onnx.ModelProto) -> None:
        self.feeds: Iterator[dict[str, np.ndarray]] = iter([fed(model, seed) for seed in range(4)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


def optimized(model: onnx.ModelProto, folder: Path, level: str = "EXTENDED") -> onnx.ModelProto:
    """By the graph optimizer that sessions use."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(_LEVELS, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimized.onnx")


def fused(
    model: onnx.ModelProto, folder: Path, kind: str = "bert", *, half: bool = False, **settings: bool
) -> onnx.ModelProto:
    """By the optimizer of transformers, of one kind."""
    onnx.save(model, folder / "float.onnx")
    options = transformers.FusionOptions(kind)
    for name, value in settings.items():
        setattr(options, name, value)
    result = transformers.optimize_model(
        str(folder / "float.onnx"),
        kind,
        num_heads=4,
        hidden_size=64,
        optimization_options=options,
        opt_level=0,
    )
    if half:
        result.convert_float_to_float16(keep_io_types=True)
    result.save_model_to_file(str(folder / "fused.onnx"))
    return onnx.load(folder / "fused.onnx")


def halved(model: onnx.ModelProto, _: Path, *, keep_io: bool) -> onnx.ModelProto:
    """In float16."""
    return float16.convert_float_to_float16(model, keep_io_types=keep_io)


def dynamically(
    model: onnx.ModelProto, folder: Path, weights: str, *, per_channel: bool = False, reduced: bool = False
) -> onnx.ModelProto:
    """Quantized weights, and inputs that are quantized as they come."""
    onnx.save(model, folder / "float.onnx")
    quantization.quantize_dynamic(
        folder / "float.onnx",
        folder / "quantized.onnx",
        per_channel=per_channel,
        reduce_range=reduced,
        weight_type=quantization.QuantType[weights],
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},  # of what shape inference does not know
    )
    return onnx.load(folder / "quantized.onnx")


def statically(
    model: onnx.ModelProto,
    folder: Path,
    form: str,
    activations: str,
    weights: str,
    *,
    per_channel: bool = False,
    **extra: Any,
) -> onnx.ModelProto:
    """Quantized weights and activations, by the extrema of a few runs."""
    onnx.save(model, folder / "float.onnx")
    quantization.quantize_static(
        folder / "float.onnx",
        folder / "quantized.onnx",
        _Calibration(model),
        quant_format=quantization.QuantFormat[form],
        per_channel=per_channel,
        activation_type=quantization.QuantType[activations],
        weight_type=quantization.QuantType[weights],
        extra_options=extra,
    )
    return onnx.load(folder / "quantized.onnx")


def in_blocks(
    model: onnx.ModelProto,
    _: Path,
    block: int,
    *,
    bits: int = 4,
    symmetric: bool = True,
    level: int | None = None,
    form: str = "QOperator",
    operators: tuple[str, ...] = ("MatMul",),
) -> onnx.ModelProto:
    """Weights of a few bits with a scale for each block."""
    settings = nbits.DefaultWeightOnlyQuantConfig(
        block_size=block,
        bits=bits,
        is_symmetric=symmetric,
        accuracy_level=level,
        quant_format=quantization.QuantFormat[form],
        op_types_to_quantize=operators,
    )
    quantizer = nbits.MatMulNBitsQuantizer(model, algo_config=settings)
    quantizer.process()
    return quantizer.model.model


def in_bnb4(model: onnx.ModelProto, _: Path, kind: int, block: int) -> onnx.ModelProto:
    """Weights of 4 bits that stand for 16 numbers: 0 of floating point, 1 of a normal distribution."""
    quantizer = bnb4.MatMulBnb4Quantizer(model, kind, block)
    quantizer.process()
    return quantizer.model.model


def both(*tools: Tool) -> Tool:
    """One after the other."""

    def apply(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
        for tool in tools:
            model = tool(model, folder)
        return model

    return apply


EXACT: dict[str, Tool] = {
    "basic": partial(optimized, level="BASIC"),
    "extended": optimized,
    "bert": fused,
    "bert with MultiHeadAttention": partial(fused, use_multi_head_attention=True),
    **{
        kind: partial(fused, kind=kind) for kind in ("bart", "clip", "conformer", "gpt2", "t5", "unet", "vit")
    },
    "4 bits of 16": partial(in_blocks, block=16),
    "4 bits of 32, asymmetric": partial(in_blocks, block=32, symmetric=False),
    "4 bits of 128, level 1": partial(in_blocks, block=128, symmetric=False, level=1),
    "8 bits of 32": partial(in_blocks, block=32, bits=8),
    "4 bits of 32 as QDQ": partial(in_blocks, block=32, form="QDQ"),
    "4 bits of 32 as QDQ, asymmetric": partial(in_blocks, block=32, form="QDQ", symmetric=False),
    "4 bits of 32, words too": partial(in_blocks, block=32, operators=("MatMul", "Gather")),
    "extended, 4 bits of 32": both(optimized, partial(in_blocks, block=32)),
    "bert, 4 bits of 32": both(fused, partial(in_blocks, block=32)),
    "fp4": partial(in_bnb4, kind=0, block=16),
    "nf4": partial(in_bnb4, kind=1, block=64),
}
"""What they make gives the same numbers, whoever runs it."""

HALF: dict[str, Tool] = {
    "float16": partial(halved, keep_io=True),
    "float16, inputs too": partial(halved, keep_io=False),
    "float16, extended": both(partial(halved, keep_io=True), optimized),
    "bert in float16": partial(fused, half=True),
    "float16, 4 bits of 32": both(partial(halved, keep_io=True), partial(in_blocks, block=32)),
}

_U8S8: dict[str, Any] = {"activations": "QUInt8", "weights": "QInt8"}
_S8S8: dict[str, Any] = {"activations": "QInt8", "weights": "QInt8"}
_U8U8: dict[str, Any] = {"activations": "QUInt8", "weights": "QUInt8"}
QUANTIZED: dict[str, Tool] = {
    "4 bits of 32, level 4": partial(in_blocks, block=32, level=4),
    "bert with FastGelu": partial(fused, enable_gelu_approximation=True),
    "dynamic int8": partial(dynamically, weights="QInt8"),
    "dynamic uint8": partial(dynamically, weights="QUInt8"),
    "dynamic int8 per channel": partial(dynamically, weights="QInt8", per_channel=True, reduced=True),
    "dynamic int8, extended": both(partial(dynamically, weights="QInt8"), optimized),
    "extended, dynamic int8": both(optimized, partial(dynamically, weights="QInt8")),
    "bert, dynamic int8": both(fused, partial(dynamically, weights="QInt8")),
    "QDQ u8 s8": partial(statically, form="QDQ", **_U8S8),
    "QDQ s8 s8 per channel": partial(statically, form="QDQ", **_S8S8, per_channel=True),
    "QDQ u8 u8, extended": both(partial(statically, form="QDQ", **_U8U8), optimized),
    "QDQ u16 s8": partial(
        statically, form="QDQ", activations="QUInt16", weights="QInt8", UseQDQContribOps=True
    ),
    "QDQ s8 s4": partial(statically, form="QDQ", activations="QInt8", weights="QInt4", UseQDQContribOps=True),
    "QOperator u8 s8": partial(statically, form="QOperator", **_U8S8),
    "QOperator u8 u8 per channel": partial(statically, form="QOperator", **_U8U8, per_channel=True),
    "QOperator s8 s8": partial(statically, form="QOperator", **_S8S8),
    "QOperator u8 s8, extended": both(partial(statically, form="QOperator", **_U8S8), optimized),
}
"""Roundings to steps are in what they make: a sum near the middle of two steps goes to one or the other."""

TOOLS: dict[str, Tool] = EXACT | HALF | QUANTIZED
_LIMITS = dict.fromkeys(EXACT, 1e-4) | dict.fromkeys(HALF, 4e-3) | dict.fromkeys(QUANTIZED, 3e-2)
_GROWN = {"unet": 3.0}
"""Its random weights let a step grow to eight on the way through 23 roundings: the first difference is in one
sum of 4,096, which lies between two steps."""


def limit(network: str, tool: str) -> float:
    """How far results may be from onnxruntime's, as a fraction of the largest one."""
    return _LIMITS[tool] * (_GROWN.get(network, 1.0) if tool in QUANTIZED else 1.0)
