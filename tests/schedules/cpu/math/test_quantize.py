"""Quantizing without divisions gives what divisions give."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.schedules.rule import Scheduled
from tests.schedules.cpu.conftest import Harness

SCALES = [1.0, 0.1, 0.003921569, 1 / 3, 7.3e-9, 3e18, -0.02, 5e-38, 1e-42, 0.0]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38, -3.4e38]


def quantizer(harness: Harness, shape: tuple[int, ...], dtype: str, scale: tuple[int, ...] = ()) -> Scheduled:
    function = harness.function(
        lambda emit, x, s, z: emit(relax.op.quantize(x, s, z, axis=-1, out_dtype=dtype)),
        [shape, scale, scale],
        ["float32", "float32", dtype],
    )
    return harness.schedule(function, [1, 2])


def run(harness: Harness, scheduled: Scheduled, x: np.ndarray, scale: object, zero: object) -> np.ndarray:
    dtype = str(scheduled.function.params[2].dtype)
    arrays = [x, np.asarray(scale, "f4"), np.asarray(zero, dtype)]
    (result,) = harness.run(scheduled.function, scheduled, arrays)
    return result


def expected(x: np.ndarray, scale: np.float32, zero: int, dtype: str) -> np.ndarray:
    """By a division in float32, as onnxruntime does; a scale of almost nothing saturates, too."""
    limits = np.iinfo(dtype)
    size = np.clip(np.abs(scale), np.float32(1e-36), np.float32(1e36))
    with np.errstate(all="ignore"):
        steps = np.rint(x / np.copysign(size, scale if scale else np.float32(1)))
    return np.clip(np.nan_to_num(steps, nan=-np.inf) + zero, limits.min, limits.max).astype(dtype)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("dtype", "zero"), [("uint8", 0), ("uint8", 131), ("int8", -7)])
def test_numbers_are_those_of_a_division(harness: Harness, dtype: str, zero: int, scale: float) -> None:
    rng, step = np.random.default_rng(5), np.float32(scale)
    middles = (np.arange(-300, 300) + 0.5).astype("f4") * step
    around = [middles, np.nextafter(middles, np.float32(9)), np.nextafter(middles, np.float32(-9))]
    patterns = rng.integers(0, 1 << 32, 2000, dtype=np.uint64).astype("u4").view("f4")
    uniform = rng.uniform(-300, 300, 2291).astype("f4") * step
    x = np.concatenate([np.array(SPECIAL, "f4"), *around, patterns, uniform])
    scheduled = quantizer(harness, x.shape, dtype)
    assert "hybridc_steps" in scheduled.function.script()
    result = run(harness, scheduled, x, step, zero)
    exact = expected(x, step, zero, dtype)
    sure = ~np.isnan(x) if scale >= 0 else np.isfinite(x)
    np.testing.assert_array_equal(result[sure], exact[sure])


def test_scales_of_channels_are_divided_by(harness: Harness) -> None:
    x = np.random.default_rng(6).standard_normal((5, 19)).astype("f4")
    scales = np.random.default_rng(7).uniform(0.01, 0.1, 19).astype("f4")
    scheduled = quantizer(harness, x.shape, "uint8", (19,))
    assert "hybridc_steps" not in scheduled.function.script()
    result = run(harness, scheduled, x, scales, np.full(19, 128))
    np.testing.assert_array_equal(result, np.clip(np.rint(x / scales) + 128, 0, 255).astype("u1"))
