"""Random graphs, compiled and run, agree with ONNX Runtime: fusion, overwriting and schedules together."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given

import hybridc
from hybridc import emulator
from hybridc.emulator import ThreadOrder
from hybridc.errors import PlanError
from tests.support.light_models import random_feeds
from tests.support.machines import EAGER_GPU
from tests.support.random_examples import random_examples
from tests.support.random_graphs import graphs

TOLERANCE = 1e-4
CAP_BYTES = 64 << 20
checks = list(HealthCheck)


@pytest.fixture(scope="module")
def shuffled_gpu() -> Iterator[None]:
    """An emulated GPU whose threads run in no order, and whose copies happen as late as they may."""
    emulator.start(CAP_BYTES, thread_order=ThreadOrder.SHUFFLED, lazy_streams=True)
    yield
    emulator.reset()


def compiled(model: onnx.ModelProto, path: Path, target: str, gpu_memory: str | None) -> None:
    """Compile with as much on the GPU as the budget takes."""
    hybridc.compile(model, path, target=target, gpu_memory=gpu_memory, machine=EAGER_GPU, plan_seconds=0.05)


def assert_agrees_with_onnxruntime(model: onnx.ModelProto, target: str, gpu_memory: str | None) -> None:
    feeds = random_feeds(model)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.hyb"
        compile_model = partial(compiled, model, path, target)
        try:
            compile_model(gpu_memory)
        except PlanError as refusal:
            compile_model(f"{refusal.smallest_budget_bytes}B")
        with hybridc.load(path) as session:
            got = session.run(None, feeds)
    for result, wanted in zip(got, expected, strict=True):
        assert result.shape == wanted.shape
        scale = max(np.abs(wanted).max(initial=0.0), 1e-3)
        assert np.abs(result - wanted).max(initial=0.0) <= TOLERANCE * scale


@pytest.mark.isa("avx2")
@random_examples(15)
@given(graphs())
def test_cpu_code_of_random_graphs_is_right(model: onnx.ModelProto) -> None:
    assert_agrees_with_onnxruntime(model, "avx2", None)


@pytest.mark.isa("avx2")
@pytest.mark.usefixtures("shuffled_gpu")
@random_examples(10)
@given(graphs())
def test_code_for_both_devices_of_random_graphs_is_right(model: onnx.ModelProto) -> None:
    assert_agrees_with_onnxruntime(model, "cuda:sm_75+avx2", "30%")
