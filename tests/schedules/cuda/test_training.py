"""Gradients and statistics, which training computes, on the emulated GPU against numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from hybridc import emulator
from hybridc.codegen.cuda_callback import cuda_compiler
from hybridc.ir import Device
from hybridc.passes.training.kernels import normalisation
from hybridc.passes.training.kernels.convolution import Window, convolution_weight_gradient
from hybridc.schedules.cuda.core.launch import cuda_target
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.select import schedule
from hybridc.targets import parse_target
from tests.support.emulated import compile_for_emulator

TARGET = parse_target("cuda:sm_80+avx2")
Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Case:
    """A function, its rule and launches, and what it means."""

    function: tirx.PrimFunc
    rule: str
    launches: int
    inputs: tuple[tuple[int, ...], ...]
    reference: Callable[..., Arrays]


def _tensor(*shape: int) -> relax.Var:
    return relax.Var("t", relax.TensorType(shape, "float32"))


def _wgrad(
    inputs: int, outputs: int, image: tuple[int, ...], taps: int, launches: int, **window: int
) -> Case:
    rank, batches = len(image), 3
    stride, pad, dilation = (window.get(k, d) for k, d in (("stride", 1), ("pad", 0), ("dilation", 1)))
    positions = [(e + 2 * pad - dilation * (taps - 1) - 1) // stride + 1 for e in image]
    x, dy = (batches, inputs, *image), (batches, outputs, *positions)
    shape = (taps,) * rank
    numbers = Window((stride,) * rank, (pad,) * rank, (pad,) * rank, (dilation,) * rank)
    function = convolution_weight_gradient(_tensor(*x), _tensor(*dy), numbers, shape)

    def reference(data: np.ndarray, grad: np.ndarray) -> Arrays:
        padded = np.pad(data, ((0, 0), (0, 0), *((pad, pad),) * rank))
        result = np.zeros((outputs, inputs, *shape))
        for tap in np.ndindex(*shape):
            start = [t * dilation for t in tap]
            span = [slice(s, s + p * stride, stride) for s, p in zip(start, positions, strict=True)]
            axes = [0, *range(2, 2 + rank)]
            result[(slice(None), slice(None), *tap)] = np.tensordot(
                grad, padded[(slice(None), slice(None), *span)], (axes, axes)
            )
        return [result]

    return Case(function, "conv2d", launches, (x, dy), reference)


def _statistics() -> Case:
    shape = (2, 6, 20, 20)
    norm = normalisation.Normalisation(shape, "float32", (0, 2, 3), (1,), 1e-5)

    def reference(x: np.ndarray) -> Arrays:
        return [x.mean((0, 2, 3)), 1 / np.sqrt(x.var((0, 2, 3)) + 1e-5)]

    return Case(normalisation.statistics(norm), "long_reductions", 4, (shape,), reference)


def _parameter_gradients() -> Case:
    shape = (2, 6, 20, 20)
    norm = normalisation.Normalisation(shape, "float32", (0, 2, 3), (1,), 1e-5)

    def reference(x: np.ndarray, dy: np.ndarray, mean: np.ndarray, rstd: np.ndarray) -> Arrays:
        standard = (x - mean[:, None, None]) * rstd[:, None, None]
        return [(dy * standard).sum((0, 2, 3)), dy.sum((0, 2, 3))]

    shapes = (shape, shape, (6,), (6,))
    return Case(normalisation.parameter_gradients(norm), "long_reductions", 2, shapes, reference)


CASES = {
    "wgrad": _wgrad(5, 8, (14, 14), 3, 2, pad=1),
    "strided_wgrad": _wgrad(6, 12, (29, 29), 3, 2, pad=1, stride=2),
    "dilated_signal": _wgrad(4, 7, (400,), 5, 2, pad=16, dilation=8),
    "few_positions": _wgrad(5, 8, (6, 6), 3, 1, pad=1),
    "statistics": _statistics(),
    "parameter_gradients": _parameter_gradients(),
}


@pytest.fixture(scope="module")
def scheduled() -> dict[str, Scheduled]:
    requests = {name: Request(case.function, frozenset(), TARGET) for name, case in CASES.items()}
    found = {name: schedule(request, Device.GPU) for name, request in requests.items()}
    return {name: made for name, made in found.items() if made is not None}


@pytest.fixture(scope="module")
def library(scheduled: dict[str, Scheduled]) -> tvm.runtime.Module:
    """All functions in one library, on the emulated GPU."""
    emulator.start(64 << 20)
    functions = {n: s.function.with_attr("global_symbol", n) for n, s in scheduled.items()}
    target = tvm.target.Target(cuda_target(TARGET), host="llvm")
    with cuda_compiler(compile_for_emulator):
        return tvm.compile(tvm.IRModule(functions), target=target)


@pytest.mark.parametrize("name", CASES)
def test_rule_and_launches_and_results(
    name: str, scheduled: dict[str, Scheduled], library: tvm.runtime.Module
) -> None:
    case, device = CASES[name], tvm.cuda(0)
    generator = np.random.default_rng(0)
    inputs = [generator.standard_normal(shape).astype("f4") for shape in case.inputs]
    rest = scheduled[name].function.params[len(inputs) :]
    fresh = [tvm.runtime.empty([int(e) for e in p.shape], str(p.dtype), device) for p in rest]
    before = emulator.statistics()
    library[name](*(tvm.runtime.tensor(a, device) for a in inputs), *fresh)
    device.sync()
    assert scheduled[name].rule == case.rule
    assert emulator.statistics().launches - before.launches == case.launches
    expected = case.reference(*(a.astype(np.float64) for a in inputs))
    for got, want in zip(fresh, expected, strict=False):
        np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-5 * max(1.0, np.abs(want).max()))
