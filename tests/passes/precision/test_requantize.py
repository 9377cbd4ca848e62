"""Requantization in registers: results against networks in float, and what is left in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from hybridc.compiler import plan_model
from hybridc.ir import Graph
from hybridc.options import INT8, CompileOptions
from hybridc.targets import parse_target
from tests.passes.precision.test_quantized import Network, compiled, feeds
from tests.support.amx import executing
from tests.support.exact_reference import exact_session


class Drawn(Network):
    """Every quantizer has a scale and a zero point of its own."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, per_channel=True)
        self.random = np.random.default_rng(seed)

    def quantized(self, x: str, scale: float) -> str:
        scale *= float(self.random.uniform(0.8, 1.25))
        zero = np.array(self.random.integers(-90, 90) + (128 if self.kind == "uint8" else 0), self.kind)
        parameters = [self.constant(np.float32(scale)), self.constant(zero)]
        return self.node("DequantizeLinear", [self.node("QuantizeLinear", [x, *parameters]), *parameters])

    def convolution(self, x: str, outputs: int, inputs: int, kernel: int, stride: int = 1) -> str:
        """Quantized before and behind a norm."""
        weight, pads = self.weight(outputs, inputs, kernel, kernel), [kernel // 2] * 4
        y = self.quantized(self.node("Conv", [x, weight], strides=[stride, stride], pads=pads), 0.1)
        gamma, mean = self.random.uniform(0.3, 0.6, outputs), self.random.normal(0, 0.1, outputs)
        vectors = [gamma, mean, mean, np.ones(outputs)]
        return self.node("BatchNormalization", [y, *(self.constant(v.astype("f4")) for v in vectors)])


def bottleneck(kind: str, seed: int, *, relu: bool = True) -> onnx.ModelProto:
    """Two residual blocks of random widths, the first of which has a convolution on either way."""
    g = Drawn(kind, seed)
    narrow, wide, inputs = (int(n) for n in g.random.integers(5, 70, 3))
    stride, size = int(g.random.integers(1, 3)), [int(n) for n in g.random.integers(6, 20, 2)]

    def activated(y: str, scale: float) -> str:
        return g.quantized(g.node("Relu", [y]) if relu else y, scale)

    x = g.quantized("x", 0.03)
    y = activated(g.convolution(x, narrow, inputs, 1), 0.03)
    y = activated(g.convolution(y, narrow, narrow, 3, stride), 0.03)
    y = g.quantized(g.convolution(y, wide, narrow, 1), 0.04)
    y = activated(g.node("Add", [y, g.quantized(g.convolution(x, wide, inputs, 1, stride), 0.04)]), 0.05)
    z = activated(g.convolution(y, narrow, wide, 1), 0.03)
    z = g.quantized(g.convolution(z, wide, narrow, 1), 0.04)
    y = activated(g.node("Add", [z, y]), 0.06)
    return g.model((1, inputs, *size), y, (1, wide, *(-(-n // stride) for n in size)))


def graph(model: onnx.ModelProto) -> Graph:
    """For AMX, which this processor need not have."""
    options = CompileOptions(target=parse_target("amx"), precision=INT8)
    return plan_model(model, options).graphs[0]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("target", "kind", "relu", "seed"),
    [
        ("amx", "uint8", True, 1),
        ("avx512_vnni", "int8", False, 2),
        pytest.param("avx512_vnni", "uint8", True, 3, marks=SLOW),
        pytest.param("amx", "int8", True, 4, marks=SLOW),
        pytest.param("avx512_bf16_emulated", "uint8", False, 5, marks=SLOW),
    ],
)
def test_drawn_blocks_give_what_floats_do_but_for_steps(
    tmp_path: Path, target: str, kind: str, relu: bool, seed: int
) -> None:
    model = bottleneck(kind, seed, relu=relu)
    reference = exact_session(model)
    with executing(target):
        results = compiled(model, tmp_path, target)
    for x, result in zip(feeds(model), results, strict=True):
        (expected,) = reference.run(None, {"x": x})
        step = np.diff(np.unique(expected)).min()
        off = np.abs(result - expected) / step
        # numbers between two steps are few, and may become either
        assert len(np.unique(expected)) > 20
        assert off.max() <= 2.01 and (off > 0.5).mean() < 0.02


def test_only_bytes_and_one_factor_for_each_quantizer_are_left() -> None:
    made = graph(bottleneck("uint8", 4))
    integers = [kernel for kernel in made.kernels if kernel.precision == "int8"]
    assert len(integers) == 6
    assert all(made.tensor[kernel.outputs[0]].dtype == "uint8" for kernel in integers[:-1])
    # data, weights; per channel a correction, two factors, a shift; two zero points, and a factor behind ReLU
    assert all(len(kernel.inputs) <= 9 for kernel in integers[:2])


def test_layers_of_other_scales_share_their_kernels() -> None:
    g = Drawn("uint8", 5)
    y = g.quantized("x", 0.03)
    for _ in range(4):
        y = g.quantized(g.convolution(y, 32, 32, 1), 0.04)
    kernels = graph(g.model((1, 32, 9, 9), y, (1, 32, 9, 9))).kernels
    integers = [kernel for kernel in kernels if kernel.precision == "int8"]
    # the first one reads plain data, and the last one's result is dequantized
    assert len(integers) == 4 and integers[1].function == integers[2].function
