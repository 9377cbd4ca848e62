"""Branches and loops within one another, drawn at random, against onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import hybridc
from hybridc import emulator
from tests.support.control_flow import SIZE, drawn_network
from tests.support.exact_reference import exact_session
from tests.support.machines import EAGER_GPU


def _agrees(model: onnx.ModelProto, path: Path, **options: Any) -> None:
    reference = exact_session(model)
    hybridc.compile(model, path, plan_seconds=0.02, **options)
    with hybridc.load(path) as session:
        before = session.memory()
        for seed in range(12):
            dice = np.random.default_rng(seed)
            feeds = {name: 2 * dice.standard_normal(SIZE, dtype=np.float32) for name in ("x", "z")}
            found = session.run(None, feeds)
            for value, wanted in zip(found, reference.run(None, feeds), strict=True):
                np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-4)
        assert session.memory() == before


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 9))])
def test_the_cpu_agrees(seed: int, tmp_path: Path) -> None:
    _agrees(drawn_network(seed), tmp_path / "m.hyb", target="avx2")


@pytest.mark.parametrize("seed", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_gpu_with_half_the_memory_agrees(seed: int, tmp_path: Path) -> None:
    emulator.start(1 << 22, lazy_streams=True)
    try:
        model, path = drawn_network(seed, depth=2, count=3), tmp_path / "m.hyb"
        _agrees(model, path, target="cuda+avx2", gpu_memory="50%", machine=EAGER_GPU)
    finally:
        emulator.reset()
