"""Reductions of windows whose loads threads share: drawn windows compute what numpy says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tvm import s_tir
from tvm.relax import op

from hybridc.passes.training.kernels.resize import resize_gradient
from hybridc.schedules.cuda.core import windows
from tests.schedules.cuda import references as ref
from tests.schedules.cuda.families import convolution
from tests.schedules.cuda.harness import Case, case, check

Array = np.ndarray
DRAWN = 8


def drawn_cases(seed: int) -> dict[str, Case]:
    """Depthwise convolutions of one to three axes, and pooling; some with tails."""
    generator, values = random.Random(seed), np.random.default_rng(seed)
    cases = {}
    for number in range(DRAWN):
        rank, taps = generator.choice((1, 2, 2, 3)), generator.choice((3, 4, 5))
        stride = generator.choice((1, 1, 2)) if taps > 3 else 1
        channels, size = generator.choice((1, 3)), taps + generator.randrange(4, 9)
        padding = generator.randrange(taps)
        data = values.standard_normal((2, channels, *(size,) * rank)).astype("float32")
        weight = (channels, 1, *(taps,) * rank)
        family = convolution(data.shape, weight, stride=stride, padding=padding, groups=channels)
        inputs = [data, *(values.standard_normal(s).astype("float32") for s in family.shapes[1:])]

        def expected(
            x: Array, w: Array, b: Array, s: int = stride, p: int = padding, g: int = channels
        ) -> Array:
            return ref.relu(ref.conv(x, w, stride=s, padding=p, groups=g) + b)

        cases[f"depthwise_{number}"] = case(family.build, expected, inputs, "conv2d")
        pooled = values.standard_normal((2, channels, size, size + 1)).astype("float32")
        pad = padding // 2
        cases[f"pool_{number}"] = case(
            lambda e, x, t=taps, s=stride, p=pad: op.nn.relu(
                op.nn.max_pool2d(x, (t, t), strides=(s, s), padding=(p, p))
            ),
            lambda x, t=taps, s=stride, p=pad: np.maximum(ref.max_pool(x, t, s, p), 0),
            [pooled],
            "reduction",
        )
    return cases


def test_drawn_windows_are_what_numpy_says(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[s_tir.Schedule | None] = []
    scheduled = windows._scheduled

    def noted(schedule: s_tir.Schedule, anchor: str) -> s_tir.Schedule | None:
        shared.append(scheduled(schedule, anchor))
        return shared[-1]

    # small images have few results
    monkeypatch.setattr(windows, "ENOUGH_THREADS", 8)
    monkeypatch.setattr(windows, "_scheduled", noted)
    check(drawn_cases(0))
    assert sum(found is not None for found in shared) > DRAWN


@pytest.mark.parametrize("shape", [(1, 2, 32, 32), (1, 4, 16, 64)])
def test_images_as_large_as_a_block_of_threads_take_one_launch(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """TVM names the number of a block differently in two blocks of a thread where the results of a channel
    are just as many as its threads: 16 x 16 behind a pool, 8 x 32 by fours of a depthwise convolution."""
    monkeypatch.setattr(windows, "ENOUGH_THREADS", 8)
    values, channels = np.random.default_rng(1), shape[1]
    data = values.standard_normal(shape).astype("float32")
    family = convolution(shape, (channels, 1, 3, 3), padding=1, groups=channels)
    inputs = [data, *(values.standard_normal(s).astype("float32") for s in family.shapes[1:])]
    cases = {
        "pool": case(
            lambda e, x: op.nn.relu(op.nn.max_pool2d(x, (2, 2), strides=(2, 2))),
            lambda x: np.maximum(ref.max_pool(x, 2, 2, 0), 0),
            [data],
            "reduction",
        ),
        "depthwise": case(
            family.build,
            lambda x, w, b: ref.relu(ref.conv(x, w, stride=1, padding=1, groups=channels) + b),
            inputs,
            "conv2d",
        ),
    }
    check(cases)


def test_few_results_are_not_shared() -> None:
    function = convolution((1, 8, 14, 14), (8, 1, 5, 5), padding=2, groups=8).function("small")
    assert windows.windows_shared(function, "conv2d") is None


def test_tables_of_one_axis_have_no_windows() -> None:
    """What resizing reads of an image is at places that a table says."""
    function = resize_gradient((4, 6, 64, 64), (96, 70), (2, 2), "float32")
    assert windows.windows_shared(function, "resize_gradient") is None
