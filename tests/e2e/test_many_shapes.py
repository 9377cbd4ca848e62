"""Artifacts for ranges of shapes, run at many of them: results of onnxruntime, in memory that never grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import hybridc
from hybridc import emulator
from hybridc.ir import Device
from hybridc.models import build
from hybridc.runtime import Session
from tests.support.machines import EAGER_GPU
from tests.support.peak_memory import peak_bytes
from tests.support.ranges import with_drawn_weights

onnxruntime = pytest.importorskip("onnxruntime")

TARGETS = CPU, GPU = "avx2", "cuda:sm_75+avx2"
GPU_MEMORY = "512MiB"
TOLERANCE = 1e-4
MOST_PEAK = 1.1
"""Times the most host memory that runs of the largest sizes alone, or of their bucket alone, take."""

DETECTOR = """g (float[1, B, 8] features) => (float[1, B, 4] boxes, int64[K, 3] chosen)
<float[8, 4] to_corner, float[8, 1] to_score, float[4] sides> {
    corner = MatMul(features, to_corner)
    boxes = Add(corner, sides)
    score = MatMul(features, to_score)
    likely = Sigmoid(score)
    scores = Transpose<perm = [0, 2, 1]>(likely)
    most = Constant<value = int64[1] {10}>()
    overlap = Constant<value = float[1] {0.4}>()
    least = Constant<value = float[1] {0.3}>()
    chosen = NonMaxSuppression(boxes, scores, most, overlap, least)
}"""

RECOGNISER = """g (float[N, 1, 16, W] image) => (float[T, N, 12] letters)
<float[8, 1, 3, 3] w0, float[16, 8, 3, 3] w1, float[2, 64, 64] w, float[2, 64, 16] r, float[2, 128] b,
 float[32, 12] w2> {
    c0 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(image, w0)
    r0 = Relu(c0)
    p0 = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r0)
    c1 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(p0, w1)
    r1 = Relu(c1)
    p1 = MaxPool<kernel_shape = [2, 1], strides = [2, 1]>(r1)
    columns = Transpose<perm = [3, 0, 1, 2]>(p1)
    flat = Constant<value = int64[3] {0, 0, 64}>()
    x = Reshape(columns, flat)
    y, last = LSTM<hidden_size = 16, direction = "bidirectional">(x, w, r, b)
    across = Transpose<perm = [0, 2, 1, 3]>(y)
    joined = Constant<value = int64[3] {0, 0, 32}>()
    both = Reshape(across, joined)
    scores = MatMul(both, w2)
    letters = Softmax<axis = -1>(scores)
}"""


SIDES = {"sides": np.array([0, 0, 1, 1], np.float32)}
"""What boxes of the detector have on top of their corners."""


def exported(name: str) -> onnx.ModelProto:
    """A network of transformers with open dimensions."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.exports.export import VARIANTS
    from tests.exports.export import exported as export

    return export(VARIANTS[name]).model


@dataclass(frozen=True, slots=True)
class Case:
    """A network, the sizes that it is compiled for, and how many shapes are drawn."""

    model: Callable[[], onnx.ModelProto]
    dims: Mapping[str, str]
    shapes: int
    limits: Mapping[str, int] | None = None
    """Of inputs of integers: the least that is too large."""


def _resnet50() -> onnx.ModelProto:
    model = build("resnet50", size=64, dynamic_batch=True)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


CASES = {
    "bert": Case(
        lambda: exported("bert/script/dynamic"),
        {"batch": "1..8:1,8", "sequence": "1..32:1,8,32"},
        200,
        {"input_ids": 100, "token_type_ids": 2},
    ),
    "resnet50": Case(_resnet50, {"batch": "1..32:1,8,32"}, 200),
    "whisper_encoder": Case(lambda: exported("whisper_encoder/script/dynamic"), {"batch": "1..4:1,4"}, 100),
    "whisper_decoder": Case(
        lambda: exported("whisper_decoder/script/dynamic"),
        {"batch": "1..4:1,4", "sequence": "1..20:1,20", "answer": "2..12:12"},
        100,
        {"input_ids": 100},
    ),
    "detector": Case(lambda: with_drawn_weights(DETECTOR, SIDES), {"B": "1..48:1,16,48"}, 100),
    "recogniser": Case(lambda: with_drawn_weights(RECOGNISER), {"N": "1..3:3", "W": "8..96:32,96"}, 100),
}


def drawn(session: Session, limits: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Inputs of sizes that are drawn from the range."""
    random, buckets = np.random.default_rng(seed), session.buckets()
    sizes = {
        name: int(random.integers(min(b.sizes[name][0] for b in buckets), high + 1))
        for name, (_, high) in buckets[-1].sizes.items()
    }
    feeds = {}
    for given in session.get_inputs():
        shape = [sizes[given.open[i]] if i in given.open else n for i, n in enumerate(given.shape)]
        if "mask" in given.name:
            feeds[given.name] = random.integers(0, 2, shape)
            feeds[given.name][:, 0] = 1
        elif "int64" in given.type:
            feeds[given.name] = random.integers(0, limits[given.name], shape)
        else:
            feeds[given.name] = random.standard_normal(shape).astype(np.float32)
    return feeds


def compiled(case: Case, target: str, folder: Path) -> tuple[onnx.ModelProto, Path]:
    """A network and its artifact: for a GPU with half of what the largest sizes need, which is so fast that
    plans use it."""
    options: dict[str, Any] = {} if target == CPU else {"gpu_memory": "50%", "machine": EAGER_GPU}
    model, path = case.model(), folder / "model.hyb"
    hybridc.compile(model, path, target=target, dims=case.dims, plan_seconds=0.5, threads=2, **options)
    return model, path


def resident_bytes() -> int:
    """What this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_random_shapes_agree(name: str, target: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, path = compiled(case, target, tmp_path)
    reference = onnxruntime.InferenceSession(model.SerializeToString())
    names = {value.name for value in reference.get_inputs()}
    with hybridc.load(path, emulate_gpu=None if target == CPU else GPU_MEMORY) as session:
        memory, largest = session.memory(), max(bucket.gpu_bytes for bucket in session.buckets())
        peak = 0 if target == CPU else emulator.statistics().peak_bytes
        for seed in range(case.shapes):
            feeds = drawn(session, case.limits or {}, seed)
            expected = reference.run(None, {name: feeds[name] for name in names})
            for found, wanted in zip(session.run(None, feeds), expected, strict=True):
                assert found.shape == wanted.shape
                scale = np.abs(wanted).max(initial=1e-30)
                np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * scale, err_msg=str(seed))
        assert session.memory() == memory
        assert target == CPU or memory[Device.GPU].allocated_bytes == largest > 0
        assert target == CPU or emulator.statistics().peak_bytes == peak


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_five_thousand_runs_take_no_more_memory(target: str, tmp_path: Path) -> None:
    _, path = compiled(CASES["recogniser"], target, tmp_path)
    with hybridc.load(path, emulate_gpu=None if target == CPU else GPU_MEMORY) as session:
        held = [0, 0]
        peak = emulator.statistics().peak_bytes if target != CPU else 0
        for part, (first, last) in enumerate(((0, 1000), (1000, 5000))):
            for seed in range(first, last):
                session.run(None, drawn(session, {}, seed))
            held[part] = resident_bytes()
        assert held[1] <= 1.02 * held[0]
        assert target == CPU or emulator.statistics().peak_bytes == peak


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_all_sizes_take_no_more_host_memory_than_the_largest(target: str, tmp_path: Path) -> None:
    _, path = compiled(CASES["recogniser"], target, tmp_path)
    emulate = None if target == CPU else GPU_MEMORY
    largest, drawn_ones = (peak_bytes(path, runs, emulate_gpu=emulate) for runs in (1, 5000))
    assert 0 < drawn_ones <= MOST_PEAK * largest


@pytest.mark.slow
def test_eight_buckets_take_little_more_host_memory_than_one(tmp_path: Path) -> None:
    def peak(name: str, dims: Mapping[str, str]) -> int:
        """The median of five."""
        (tmp_path / name).mkdir()
        _, path = compiled(replace(CASES["recogniser"], dims=dims), CPU, tmp_path / name)
        return sorted(peak_bytes(path, 300) for _ in range(5))[2]

    one = peak("one", {"N": "1..3:3", "W": "8..96:96"})
    assert 0 < peak("eight", {"N": "1..3:1,3", "W": "8..96:16,32,64,96"}) <= MOST_PEAK * one
