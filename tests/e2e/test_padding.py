"""Runs of smaller sizes than their bucket's: right whatever lies in the padding, and with less work."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import hybridc
from hybridc import emulator
from hybridc.runtime import Session
from tests.support.ranges import with_drawn_weights

TARGETS = CPU, GPU = "avx2", "cuda:sm_75+avx2"
RUNS = 25

ENCODER = """g (float[N, S, 64] x) => (float[N, S, 64] y, float[N, 64] pooled)
<float[64, 64] wq, float[64, 64] wk, float[64, 64] wv, float[64, 64] wo, float[64] scale> {
    heads = Constant<value = int64[4] {0, 0, 4, 16}>()
    q0 = MatMul(x, wq)
    k0 = MatMul(x, wk)
    v0 = MatMul(x, wv)
    q1 = Reshape(q0, heads)
    k1 = Reshape(k0, heads)
    v1 = Reshape(v0, heads)
    q = Transpose<perm = [0, 2, 1, 3]>(q1)
    k = Transpose<perm = [0, 2, 3, 1]>(k1)
    v = Transpose<perm = [0, 2, 1, 3]>(v1)
    s = MatMul(q, k)
    p0 = Softmax<axis = -1>(s)
    missing = IsNaN(p0)
    nought = Constant<value = float[1] {0.0}>()
    p = Where(missing, nought, p0)
    c0 = MatMul(p, v)
    c1 = Transpose<perm = [0, 2, 1, 3]>(c0)
    whole = Constant<value = int64[3] {0, 0, -1}>()
    c = Reshape(c1, whole)
    o = MatMul(c, wo)
    r = Add(o, x)
    y = LayerNormalization<axis = -1>(r, scale)
    pooled = ReduceMean<axes = [1], keepdims = 0>(y)
}"""

CONVOLUTIONS = """g (float[N, 8, 24, 24] x) => (float[N, 10] y)
<float[16, 8, 3, 3] w0, float[16, 1, 3, 3] w1, float[32, 16, 1, 1] w2, float[32, 10] w3> {
    c0 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w0)
    r0 = Relu(c0)
    c1 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2], group = 16>(r0, w1)
    c2 = Conv<kernel_shape = [1, 1]>(c1, w2)
    r2 = Relu(c2)
    p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r2)
    g = GlobalAveragePool(p)
    f = Flatten(g)
    y = Gemm(f, w3)
}"""

LOOKED_UP = """g (float[N, S, 64] x) => (float[N, S, 16] y)
<float[64, 64] w, float[64, 64] table, float[64, 16] last> {
    m = MatMul(x, w)
    a = Relu(m)
    best = ArgMax<axis = 2, keepdims = 0>(a)
    e = Gather(table, best)
    r = Relu(e)
    y = MatMul(r, last)
}"""

CASES: Mapping[str, tuple[str, dict[str, str]]] = {
    "encoder": (ENCODER, {"N": "1..3:3", "S": "2..90:12,90"}),
    "convolutions": (CONVOLUTIONS, {"N": "1..6:6"}),
    "looked_up": (LOOKED_UP, {"N": "1..6:6", "S": "2..64:64"}),
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Of a case, for a target. All of it is on the GPU, if there is one, and no budget asks for tiles."""

    @functools.cache
    def compiled(name: str, target: str) -> Path:
        text, dims = CASES[name]
        path = tmp_path_factory.mktemp("padding") / "model.hyb"
        options: Any = {} if target == CPU else {"pins": {"*": "gpu"}}
        model = with_drawn_weights(text)
        hybridc.compile(model, path, target=target, dims=dims, plan_seconds=0.2, threads=2, **options)
        return path

    return compiled


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, target), marks=[pytest.mark.slow] * (target == GPU and name != "convolutions"))
        for target in TARGETS
        for name in CASES
    ],
)
def case(
    request: pytest.FixtureRequest, artifact: Callable[[str, str], Path]
) -> Iterator[tuple[Session, onnx.ModelProto, str]]:
    name, target = request.param
    path, model = artifact(name, target), with_drawn_weights(CASES[name][0])
    with hybridc.load(path, emulate_gpu=None if target == CPU else "32MiB") as session:
        yield session, model, target


def fed(session: Session, sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    [given] = session.get_inputs()
    shape = [sizes[given.open[i]] if i in given.open else n for i, n in enumerate(given.shape)]
    return {given.name: np.random.default_rng(seed).standard_normal(shape).astype(np.float32)}


def test_what_earlier_runs_left_in_padding_does_not_matter(
    case: tuple[Session, onnx.ModelProto, str],
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    session, model, _ = case
    reference = onnxruntime.InferenceSession(model.SerializeToString())
    random, buckets = np.random.default_rng(0), session.buckets()
    for seed in range(RUNS):
        bucket = buckets[seed % len(buckets)]
        for each in buckets:
            largest = fed(session, {name: high for name, (_, high) in each.sizes.items()}, seed)
            session.run(None, {name: np.full_like(array, np.nan) for name, array in largest.items()})
        sizes = {name: int(random.integers(low, high + 1)) for name, (low, high) in bucket.sizes.items()}
        feeds = fed(session, sizes, seed)
        for found, wanted in zip(session.run(None, feeds), reference.run(None, feeds), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4, err_msg=str(sizes))


def test_kernels_that_positions_follow_from_are_left_whole(
    case: tuple[Session, onnx.ModelProto, str],
) -> None:
    session, _, _ = case
    graph = session.artifact.in_buckets()[-1].graph
    sized = {kernel.name: kernel for kernel in graph.kernels if "_sized_" in kernel.function}
    has_positions = any(kernel.checks for kernel in graph.kernels)
    assert bool(sized) != has_positions  # of `looked_up` all kernels are in front of them, or small
    assert all(graph.tensor[name].dtype == "float32" for kernel in sized.values() for name in kernel.outputs)


def test_what_a_mask_chooses_is_computed_along_its_axis(artifact: Callable[[str, str], Path]) -> None:
    """Values are zero behind the last key, and so whole; all else of a layer skips both axes."""
    with hybridc.load(artifact("encoder", CPU)) as session:
        graph = session.artifact.in_buckets()[-1].graph
        sizes = {
            kernel.function.split("_sized_")[0]: {name for name in kernel.inputs if "size" in name}
            for kernel in graph.kernels
            if "_sized_" in kernel.function
        }
    both = {"size_of_N", "size_of_S"}
    assert sizes["attention"] == sizes["layer_norm"] == sizes["matmul"] == both
    assert sizes["permute_dims_where"] == {"size_of_N"}
    assert sizes["where"] == {"size_of_N"}  # in front of the mean over positions


@pytest.mark.parametrize("name", [pytest.param("encoder", marks=pytest.mark.slow), "convolutions"])
def test_a_gpu_reads_less_for_smaller_sizes(name: str, artifact: Callable[[str, str], Path]) -> None:
    with hybridc.load(artifact(name, GPU), emulate_gpu="32MiB") as session:
        bucket = session.buckets()[-1]

        def sectors(sizes: Mapping[str, int]) -> float:
            launches = emulator.count_launches(lambda: session.run(None, fed(session, sizes, 0)))
            return sum(each.read_sectors + each.written_sectors for each in launches)

        largest = {name: high for name, (_, high) in bucket.sizes.items()}
        assert sectors({name: low for name, (low, _) in bucket.sizes.items()}) < 0.6 * sectors(largest)
