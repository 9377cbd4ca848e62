"""Tensors of 16-bit floats around float32 arithmetic, on a CPU: results, code, and what is widened where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tvm import relax
from tvm_ffi import structural_equal

from hybridc.schedules.cpu.conv1d.fourier.fft_conv1d import fft_conv1d
from hybridc.schedules.cpu.matmul.matmul import matmul as matmul_rule
from hybridc.schedules.storage import stored, widened
from tests.support.narrow import assembly
from tests.support.programs import drawn

op = relax.op
Emit = Callable[[relax.Expr], relax.Var]


@dataclass(frozen=True)
class Case:
    """A function, the shapes of its arguments, and the same in numpy; trailing arguments are weights."""

    build: Callable[..., relax.Var]
    shapes: Sequence[tuple[int, ...]]
    reference: Callable[..., np.ndarray]
    weights: int = 0


def _softmax(x: np.ndarray) -> np.ndarray:
    power = np.exp(x - x.max(-1, keepdims=True))
    return power / power.sum(-1, keepdims=True)


def _linear(emit: Emit, x: relax.Var, w: relax.Var, b: relax.Var) -> relax.Var:
    return emit(op.nn.relu(emit(op.add(emit(op.matmul(x, w)), b))))


def _conv1x1(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.einsum("nchw,oc->nohw", x, w[:, :, 0, 0])


CASES = {
    "linear": Case(_linear, [(9, 50), (50, 37), (37,)], lambda x, w, b: np.maximum(x @ w + b, 0), 2),
    "no epilogue": Case(lambda e, x, w: e(op.matmul(x, w)), [(5, 33), (33, 40)], lambda x, w: x @ w, 1),
    "batched": Case(lambda e, x, y: e(op.matmul(x, y)), [(2, 7, 30), (2, 30, 21)], lambda x, y: x @ y),
    "softmax": Case(lambda e, x: e(op.nn.softmax(x)), [(6, 45)], _softmax),
    "mean": Case(lambda e, x: e(op.mean(x, [2])), [(3, 5, 77)], lambda x: x.mean(2)),
    "maximum": Case(lambda e, x: e(op.max(x, [1])), [(4, 19, 13)], lambda x: x.max(1)),
    "chain": Case(
        lambda e, x, y: e(op.tanh(e(op.add(x, y)))), [(3, 35), (35,)], lambda x, y: np.tanh(x + y), 1
    ),
    "conv": Case(lambda e, x, w: e(op.nn.conv2d(x, w)), [(1, 9, 6, 7), (20, 9, 1, 1)], _conv1x1, 1),
}
NARROW = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def arguments(case: Case) -> list[np.ndarray]:
    return [drawn(seed, *shape) for seed, shape in enumerate(case.shapes)]


def constants(case: Case) -> list[int]:
    return list(range(len(case.shapes) - case.weights, len(case.shapes)))


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", CASES)
def test_results_are_those_of_float32_rounded_once(costly_harness: Any, kind: str, dtype: str) -> None:
    case, narrow = CASES[kind], NARROW[dtype]
    function = costly_harness.function(case.build, case.shapes)
    half = stored(function, dict.fromkeys(range(len(function.params)), dtype))
    scheduled = costly_harness.schedule(half, constants(case))
    inputs = [a.astype(narrow) for a in arguments(case)]
    (result,) = costly_harness.run(half, scheduled, inputs)
    exact = case.reference(*(a.astype("f8") for a in inputs))
    assert result.dtype == narrow
    # half a unit in the last place of each element, and what float32 is off
    allowed = np.abs(exact) * float(ml_dtypes.finfo(narrow).eps) / 2 + 2e-6 * np.abs(exact).max()
    assert (np.abs(result.astype("f8") - exact) <= allowed).all()


@pytest.mark.parametrize("positions", [[0], [3], [1, 2], [0, 3]])
def test_any_of_the_tensors_may_be_narrow(costly_harness: Any, positions: list[int]) -> None:
    case = CASES["linear"]
    function = costly_harness.function(case.build, case.shapes)
    half = stored(function, dict.fromkeys(positions, "float16"))
    scheduled = costly_harness.schedule(half, constants(case))
    inputs = [
        a.astype("f2") if i in positions else a.astype("f2").astype("f4")
        for i, a in enumerate(arguments(case))
    ]
    (result,) = costly_harness.run(half, scheduled, inputs)
    exact = case.reference(*(a.astype("f8") for a in inputs))
    assert np.abs(result - exact).max() <= (2**-10 if 3 in positions else 1e-5) * np.abs(exact).max()


@pytest.mark.parametrize("kind", CASES)
def test_function_with_float32_tensors_is_found_again(avx2: Any, kind: str) -> None:
    function = avx2.function(CASES[kind].build, CASES[kind].shapes)
    half = stored(function, dict.fromkeys(range(len(function.params)), "float16"))
    found = widened(half)
    assert found is not None and list(found.dtypes) == list(range(len(function.params)))
    assert structural_equal(found.function.body, function.body, map_free_vars=True)
    assert widened(function) is None


def test_elements_that_are_moved_are_not_converted(avx2: Any) -> None:
    for moved in (lambda x: op.permute_dims(x, [1, 0]), lambda x: op.nn.pad(x, [0, 0, 1, 2])):
        function = avx2.function(lambda emit, x, moved=moved: emit(moved(x)), [(5, 7)])
        assert widened(stored(function, {0: "float16", 1: "float16"})) is None


def test_vectors_are_converted_whole(avx2: Any) -> None:
    """Weights in the loop; the rows, of which single elements are multiplied, once in front of it."""
    case = CASES["linear"]
    function = avx2.function(case.build, [(64, 128), (128, 96), (96,)])
    half = stored(function, dict.fromkeys(range(4), "float16"))
    scheduled = avx2.schedule(half, [1, 2])
    assert scheduled.rule == matmul_rule.__name__
    types = [str(p.dtype) for p in scheduled.function.params]
    assert types == ["float16"] * 4 + ["float32"] and scheduled.workspace_bytes == (64 * 128 * 4,)
    found = assembly(scheduled, avx2.isa)
    lines = [line for line in found.splitlines() if "vcvt" in line]
    assert any("vcvtph2ps" in line and "ymm" in line for line in lines)
    assert any("vcvtps2ph" in line and "ymm" in line for line in lines)
    assert not any("xmm" in line.rpartition(",")[2] and "vcvtph2ps" in line for line in lines)


def test_weights_whose_elements_are_broadcast_are_widened_when_they_are_packed(avx2: Any) -> None:
    """Direct convolution multiplies single weights by vectors of columns."""
    shapes = [(1, 8, 5, 40, 40), (16, 8, 3, 3, 3)]
    function = avx2.function(lambda e, x, w: e(op.nn.conv3d(x, w)), shapes)
    half = stored(function, dict.fromkeys(range(3), "float16"))
    scheduled = avx2.schedule(half, [1])
    ((position, packing),) = scheduled.packings
    assert scheduled.rule == "conv2d" and position == 1 and packing.dtype == "float32"
    assert packing.apply(np.ones(shapes[1], "f2")).dtype == np.float32
    assert str(scheduled.function.params[1].dtype) == "float32"


def test_results_that_are_prefetched_are_rounded_where_they_are_written(avx2: Any) -> None:
    """Fourier transforms prefetch what they read and write: neither passes through memory in fp32."""

    def line(emit: Emit, x: relax.Var, w: relax.Var) -> relax.Var:
        return emit(op.nn.conv1d(x, w, padding=[200, 200], dilation=[8]))

    function = avx2.function(line, [(1, 15, 6000), (15, 15, 51)])
    half = stored(function, {0: "bfloat16", 2: "bfloat16"})
    scheduled = avx2.schedule(half, [1])
    assert scheduled.rule == fft_conv1d.__name__ and sum(scheduled.workspace_bytes) < 4 * 15 * 6000
    assert [str(p.dtype) for p in scheduled.function.params[:3]] == ["bfloat16", "float32", "bfloat16"]
