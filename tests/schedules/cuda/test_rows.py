"""Reductions of rows of drawn lengths: by warps, by blocks, and rows that registers do not hold."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, te, tirx
from tvm.relax import op

from hybridc.schedules.shapes import index_shape
from tests.schedules.cuda import references as ref
from tests.schedules.cuda.harness import Case, case, check

Array = np.ndarray
LENGTHS = (32, 33, 64, 100, 127, 128, 197, 768, 1000, 1025, 4100)
"""With and without whole vectors, whole warps, whole blocks."""


def layer_norm(x: Array, gain: Array, bias: Array) -> Array:
    return ref.normalise(x, (-1,), gain, bias)


def masked_half_softmax(x: Array, mask: Array) -> Case:
    """Arithmetic in float32 between tensors of float16, as reduced precision leaves it."""
    shape = index_shape(x.shape)
    data, added = te.placeholder(shape, "float16", "p0"), te.placeholder(shape[-1:], "float32", "p1")
    t, u = te.reduce_axis((0, shape[-1]), "t"), te.reduce_axis((0, shape[-1]), "u")
    scores = te.compute(shape, lambda i, j, k: data[i, j, k].astype("float32") + added[k], "scores")
    peak = te.compute(shape[:-1], lambda i, j: te.max(scores[i, j, t], axis=t), "peak")
    weights = te.compute(shape, lambda i, j, k: tirx.exp(scores[i, j, k] - peak[i, j]), "weights")
    total = te.compute(shape[:-1], lambda i, j: te.sum(weights[i, j, u], axis=u), "total")
    result = te.compute(shape, lambda i, j, k: (weights[i, j, k] / total[i, j]).astype("float16"), "result")
    expected = ref.softmax(x.astype("float64") + mask, -1)
    return Case(te.create_prim_func([data, added, result]), [x, mask], expected, "rows", 1e-3)


def cases_of(generator: np.random.Generator, rows: tuple[int, int], length: int) -> dict[str, Case]:
    def normal(*shape: int, dtype: str = "float32") -> Array:
        return generator.standard_normal(shape).astype(dtype)

    a, b = rows
    x, gain, bias = normal(a, b, length), normal(length), normal(length)
    return {
        "softmax": case(lambda e, x: op.nn.softmax(x, -1), lambda x: ref.softmax(x, -1), [x], "rows"),
        "log_softmax": case(
            lambda e, x: op.nn.log_softmax(x, -1), lambda x: np.log(ref.softmax(x, -1)), [x], "rows"
        ),
        "layer_norm": case(
            lambda e, x, g, b: op.nn.layer_norm(x, g, b, axes=[-1]), layer_norm, [x, gain, bias], "rows"
        ),
        "rms_norm": case(
            lambda e, x, g: op.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5),
            lambda x, g: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * g,
            [x, gain],
        ),
        "masked_half": masked_half_softmax(normal(a, b, length, dtype="float16"), normal(length)),
        # a step is 1 / 256 of the largest result
        "quantized": case(
            lambda e, x, zero: op.quantize(
                e(op.nn.softmax(x, -1)), relax.const(1 / 256, "float32"), zero, out_dtype="uint8"
            ),
            lambda x, zero: np.clip(np.rint(ref.softmax(x, -1) * 256) + zero, 0, 255),
            [x, np.array(7, "u1")],
            "rows",
            error=1 / 200,
        ),
        "mean": case(lambda e, x: op.mean(x, [-1]), lambda x: x.mean(-1), [x], "rows"),
        "sum": case(
            lambda e, x: op.sum(e(op.multiply(x, x)), [2], True), lambda x: (x**2).sum(2), [x], "rows"
        ),
        "largest": case(lambda e, x: op.max(x, [-1]), lambda x: x.max(-1), [x], "rows"),
        "both_axes": case(lambda e, x: op.sum(x, [1, 2]), lambda x: x.sum((1, 2)), [x], "rows"),
    }


@pytest.mark.parametrize("seed", range(3))
def test_drawn_rows(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = (int(generator.integers(1, 4)), int(generator.integers(1, 9)))
    check(cases_of(generator, rows, int(generator.choice(LENGTHS))))


def test_many_rows_have_a_warp_each() -> None:
    generator = np.random.default_rng(11)
    cases = cases_of(generator, (2, 513), 140)
    check({name: cases[name] for name in ("softmax", "mean", "layer_norm")})


def test_rows_that_registers_do_not_hold() -> None:
    generator = np.random.default_rng(12)
    cases = cases_of(generator, (1, 2), 33100)
    check({name: cases[name] for name in ("softmax", "mean", "layer_norm", "masked_half")})


@pytest.mark.parametrize("side", [7, 9, 14])
def test_norms_and_means_of_planes(side: int) -> None:
    generator = np.random.default_rng(side)
    x = generator.standard_normal((2, 12, side, side)).astype("float32")
    gain, bias = (generator.standard_normal(12).astype("float32") for _ in range(2))

    def grouped(x: Array, gain: Array, bias: Array) -> Array:
        parts = x.reshape(2, 4, -1)
        parts = (parts - parts.mean(-1, keepdims=True)) / np.sqrt(parts.var(-1, keepdims=True) + 1e-5)
        return parts.reshape(x.shape) * gain[:, None, None] + bias[:, None, None]

    check(
        {
            "group_norm": case(
                lambda e, x, g, b: op.nn.group_norm(x, g, b, 4, 1, [2, 3]), grouped, [x, gain, bias]
            ),
            "instance_norm": case(
                lambda e, x, g, b: op.nn.instance_norm(x, g, b, 1, [2, 3]),
                lambda x, g, b: ref.normalise(x, (2, 3), g[:, None, None], b[:, None, None]),
                [x, gain, bias],
            ),
            "global_pool": case(
                lambda e, x: op.mean(x, [2, 3], True), lambda x: x.mean((2, 3), keepdims=True), [x]
            ),
        }
    )
