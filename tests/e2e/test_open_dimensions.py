"""One artifact for every size in a range: results of onnxruntime, and memory that is promised at load."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import hybridc
from hybridc import emulator
from hybridc.bundle import write_bundle
from hybridc.cli.main import main
from hybridc.errors import ArtifactError, UsageError
from hybridc.ir import Device
from hybridc.json_values import sealed
from hybridc.runtime import Session
from tests.support.process import becomes_true, running_threads
from tests.support.ranges import with_drawn_weights

GPU_MEMORY = "16MiB"
RUNS = 60

CONVOLUTIONS = """g (float[N, 3, 12, 12] x, float[N, 2] more) => (float[N, 5] y, float[N, 2] z)
<float[8, 3, 3, 3] w0, float[8] scale, float[8] shift, float[8] mean, float[8] variance, float[8, 5] w1> {
    c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>(x, w0)
    n = BatchNormalization(c, scale, shift, mean, variance)
    r = Relu(n)
    p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
    g = GlobalAveragePool(p)
    f = Flatten(g)
    y = Gemm(f, w1)
    z = Sigmoid(more)
}"""

ENCODER = """g (int64[N, S] ids, int64[N, S] mask) => (float[N, S, 16] y, float[N, 16] pooled)
<float[20, 16] words, float[16, 16] places, float[16, 16] wq, float[16, 16] wk, float[16, 16] wv,
 float[16] scale> {
    zero = Constant<value = int64[1] {0}>()
    one = Constant<value = int64[1] {1}>()
    masked = Constant<value = float {-10000}>()
    unit = Constant<value = float {1}>()
    shape = Shape(ids)
    length = Slice(shape, one, two)
    two = Constant<value = int64[1] {2}>()
    here = Slice(places, zero, length, zero)
    e = Gather(words, ids)
    x = Add(e, here)
    heads = Constant<value = int64[4] {0, 0, 2, 8}>()
    q0 = MatMul(x, wq)
    k0 = MatMul(x, wk)
    v0 = MatMul(x, wv)
    q1 = Reshape(q0, heads)
    k1 = Reshape(k0, heads)
    v1 = Reshape(v0, heads)
    q = Transpose<perm = [0, 2, 1, 3]>(q1)
    k = Transpose<perm = [0, 2, 3, 1]>(k1)
    v = Transpose<perm = [0, 2, 1, 3]>(v1)
    m0 = Cast<to = 1>(mask)
    m1 = Sub(unit, m0)
    m2 = Mul(m1, masked)
    both = Constant<value = int64[2] {1, 2}>()
    m3 = Unsqueeze(m2, both)
    s0 = MatMul(q, k)
    s1 = Add(s0, m3)
    p = Softmax<axis = -1>(s1)
    c0 = MatMul(p, v)
    c1 = Transpose<perm = [0, 2, 1, 3]>(c0)
    whole = Constant<value = int64[3] {0, 0, -1}>()
    c = Reshape(c1, whole)
    r = Add(c, x)
    y = LayerNormalization<axis = -1>(r, scale)
    pooled = ReduceMean<axes = [1], keepdims = 0>(y)
}"""

RECURRENT = """g (float[S, N, 4] x) => (float[S, 2, N, 8] y, float[2, N, 8] last)
<float[2, 32, 4] w, float[2, 32, 8] r, float[2, 64] b> {
    y, last = LSTM<hidden_size = 8, direction = "bidirectional">(x, w, r, b)
}"""


CASES: Mapping[str, tuple[str, dict[str, str], dict[str, int]]] = {
    "convolutions": (CONVOLUTIONS, {"N": "1..5:1,5"}, {}),
    "encoder": (ENCODER, {"N": "1..3:3", "S": "2..9:4,9"}, {"ids": 20, "mask": 2}),
    "recurrent": (RECURRENT, {"N": "1..4:4", "S": "2..6:6"}, {}),
}


TARGETS = CPU, GPU = "avx2", "cuda:sm_75+avx2"


GPU_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "convolutions": {"gpu_memory": "75%", "pins": {"*": "gpu"}}  # which run faster on the CPU
}


def _marks(name: str, target: str) -> list[pytest.MarkDecorator]:
    """Of networks on a GPU one is enough for every run of the tests."""
    return [] if target == CPU or name == "convolutions" else [pytest.mark.slow]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Of a case, for a target: for a GPU with less memory than the largest sizes need."""

    @functools.cache
    def compiled(name: str, target: str) -> Path:
        text, dims, _ = CASES[name]
        path = tmp_path_factory.mktemp("open") / "model.hyb"
        options: Any = GPU_OPTIONS.get(name, {"gpu_memory": "50%"}) if target != CPU else {}
        model = with_drawn_weights(text)
        hybridc.compile(model, path, target=target, dims=dims, plan_seconds=0.2, threads=2, **options)
        return path

    return compiled


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, target), id=f"{name}-{target}", marks=_marks(name, target))
        for name in CASES
        for target in TARGETS
    ],
)
def case(
    request: pytest.FixtureRequest, artifact: Callable[[str, str], Path]
) -> Iterator[tuple[Session, onnx.ModelProto, dict[str, int]]]:
    name, target = request.param
    text, _, limits = CASES[name]
    path, model = artifact(name, target), with_drawn_weights(text)
    emulate = GPU_MEMORY if target != "avx2" else None
    with hybridc.load(path, emulate_gpu=emulate) as session:
        assert target == CPU or name not in GPU_OPTIONS or session.memory()[Device.GPU].planned_bytes
        yield session, model, limits


def sizes_of(session: Session) -> dict[str, tuple[int, int]]:
    """The smallest and the largest of each dimension."""
    buckets = session.buckets()
    return {
        name: (min(b.sizes[name][0] for b in buckets), max(b.sizes[name][1] for b in buckets))
        for name in buckets[0].sizes
    }


def drawn(session: Session, sizes: Mapping[str, int], limits: Mapping[str, int], seed: int) -> dict[str, Any]:
    random, feeds = np.random.default_rng(seed), {}
    for given in session.get_inputs():
        shape = [sizes[given.open[i]] if i in given.open else n for i, n in enumerate(given.shape)]
        if given.name in limits:
            feeds[given.name] = random.integers(0, limits[given.name], shape)
            if given.name == "mask":
                feeds[given.name][:, 0] = 1
        else:
            feeds[given.name] = random.standard_normal(shape).astype(np.float32)
    return feeds


def test_runs_of_any_size_agree_and_take_no_more_memory(
    case: tuple[Session, onnx.ModelProto, dict[str, int]],
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    session, model, limits = case
    reference = onnxruntime.InferenceSession(model.SerializeToString())
    random, bounds, memory = np.random.default_rng(1), sizes_of(session), session.memory()
    has_gpu = any(bucket.gpu_bytes for bucket in session.buckets())
    peak = emulator.statistics().peak_bytes if has_gpu else 0
    for seed in range(RUNS):
        sizes = {name: int(random.integers(low, high + 1)) for name, (low, high) in bounds.items()}
        feeds = drawn(session, sizes, limits, seed)
        for found, wanted in zip(session.run(None, feeds), reference.run(None, feeds), strict=True):
            assert found.shape == wanted.shape
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert session.memory() == memory
    assert not has_gpu or emulator.statistics().peak_bytes == peak


def test_plans_of_all_buckets_run_on_the_same_threads(tmp_path: Path) -> None:
    text, dims, _ = CASES["convolutions"]
    hybridc.compile(with_drawn_weights(text), tmp_path / "model.hyb", target=CPU, dims=dims, threads=3)
    before = running_threads()
    with hybridc.load(tmp_path / "model.hyb") as session:
        assert len(session.buckets()) > 1
        session.warm_up(runs=1)
        assert len(running_threads() - before) == session.threads - 1 == 2
    assert becomes_true(lambda: running_threads() <= before)


def test_memory_is_that_of_the_largest_bucket(case: tuple[Session, onnx.ModelProto, dict[str, int]]) -> None:
    session, _, _ = case
    buckets, memory = session.buckets(), session.memory()
    assert memory[Device.GPU].allocated_bytes == max(b.gpu_bytes for b in buckets)
    assert memory[Device.CPU].allocated_bytes == max(b.cpu_bytes for b in buckets)


@pytest.mark.parametrize("case", [("convolutions", GPU)], indirect=True)
def test_a_run_of_another_bucket_copies_but_the_weights_that_were_overwritten(
    case: tuple[Session, onnx.ModelProto, dict[str, int]],
) -> None:
    session, _, limits = case
    plans = session.artifact.in_buckets()
    feeds = [
        drawn(session, {name: high for name, (_, high) in bucket.sizes.items()}, limits, 0)
        for bucket in session.buckets()
    ]

    def copied_bytes(bucket: int) -> int:
        before = emulator.statistics().h2d_bytes
        session.run(None, feeds[bucket])
        return emulator.statistics().h2d_bytes - before

    def overwritten_bytes(bucket: int, between: int) -> int:
        there = {(w.offset_bytes, w.arena_offset_bytes) for w in plans[between].stored_plan.gpu_weights}
        used = [b for b in plans[between].plan.buffers if b.device is Device.GPU]
        lost = [
            w.size_bytes
            for w in plans[bucket].stored_plan.gpu_weights
            if w.arena_offset_bytes is not None
            and (w.offset_bytes, w.arena_offset_bytes) not in there
            and any(
                b.offset_bytes < w.arena_offset_bytes + w.size_bytes and w.arena_offset_bytes < b.end_bytes
                for b in used
            )
        ]
        return sum(lost)

    places = [{(w.tensor, w.arena_offset_bytes) for w in each.stored_plan.gpu_weights} for each in plans]
    assert set.intersection(*places)
    for bucket in range(len(plans)):
        copied_bytes(bucket)
        own = copied_bytes(bucket)
        for between in range(len(plans)):
            copied_bytes(between)
            assert copied_bytes(bucket) - own == overwritten_bytes(bucket, between)
            assert overwritten_bytes(bucket, between) < sum(
                w.size_bytes for w in plans[bucket].stored_plan.gpu_weights
            )


@pytest.mark.parametrize("case", [("convolutions", CPU)], indirect=True)
@pytest.mark.parametrize("shape", [(6, 3, 12, 12), (0, 3, 12, 12), (2, 3, 12), (2, 3, 11, 12)])
def test_other_shapes_are_refused_with_the_range(
    case: tuple[Session, onnx.ModelProto, dict[str, int]], shape: tuple[int, ...]
) -> None:
    session, _, _ = case
    feeds = {"x": np.zeros(shape, np.float32), "more": np.zeros((shape[0], 2), np.float32)}
    with pytest.raises(UsageError) as refused:
        session.run(None, feeds)
    assert refused.value.code == "HC554" and "'x'" in refused.value.what
    assert "float32[N=1..5, 3, 12, 12]" in refused.value.remedy


@pytest.mark.parametrize("case", [("convolutions", CPU), ("encoder", CPU)], indirect=True)
def test_sizes_that_differ_between_inputs_are_refused(
    case: tuple[Session, onnx.ModelProto, dict[str, int]],
) -> None:
    session, _, limits = case
    sizes = {name: high for name, (_, high) in sizes_of(session).items()}
    feeds = drawn(session, sizes, limits, 0)
    name = session.get_inputs()[1].name
    feeds[name] = feeds[name][:-1]
    with pytest.raises(UsageError) as refused:
        session.run(None, feeds)
    assert refused.value.code == "HC554" and name in refused.value.what and "N is" in refused.value.what


@pytest.mark.parametrize("case", [("convolutions", CPU)], indirect=True)
def test_commands_show_the_plan_that_their_sizes_take(
    case: tuple[Session, onnx.ModelProto, dict[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session, _, limits = case
    smallest, path, words = session.buckets()[0], str(session.artifact.path), []
    for number, (name, array) in enumerate(drawn(session, {"N": 1}, limits, 0).items()):
        np.save(tmp_path / f"{number}.npy", array)
        words += ["--input", f"{name}={tmp_path / str(number)}.npy"]
    assert main(["bench", path, *words, "--repeat", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted_us"] == smallest.predicted_us
    assert main(["bench", path, "--dim", "N=1", "--repeat", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted_us"] == smallest.predicted_us
    assert main(["run", path, *words, "--trace", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [each for each in events if each["ph"] == "X" and each["pid"] == events[0]["pid"]]
    assert max(each["ts"] + each["dur"] for each in spans) == pytest.approx(smallest.predicted_us)


@pytest.mark.parametrize("case", [("convolutions", CPU)], indirect=True)
def test_the_plan_of_a_size_is_shown(
    case: tuple[Session, onnx.ModelProto, dict[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session, _, _ = case
    path, page = str(session.artifact.path), tmp_path / "plan.html"
    assert main(["plan", path, "--dim", "N=1", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "the plan above is that of N 1" in shown and "2..5" in shown
    text = page.read_text()
    assert text.count('<div class="sizes') == 2 and '<div class="sizes hot"><span>N 1</span>' in text
    assert main(["plan", path]) == 0
    assert "the plan above is that of N 2..5" in capsys.readouterr().out
    for size, code in (("N=6", "HC554"), ("M=1", "HC512"), ("N=1..2", "HC512")):
        assert main(["plan", path, "--dim", size]) == 2
        assert code in capsys.readouterr().err


@pytest.mark.parametrize("case", [("convolutions", CPU)], indirect=True)
def test_bound_arrays_of_any_size_are_read(case: tuple[Session, onnx.ModelProto, dict[str, int]]) -> None:
    session, _, limits = case
    for size in (1, 3, 5):
        feeds, binding = drawn(session, {"N": size}, limits, size), session.io_binding()
        for name, array in feeds.items():
            binding.bind_input(name, array)
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(binding.get_outputs()[0], session.run(["y"], feeds)[0])
    binding.bind_output("y", np.zeros((3, 5), np.float32))
    with pytest.raises(UsageError) as refused:
        session.run_with_iobinding(binding)
    assert refused.value.code == "HC554" and refused.value.remedy == "bind the output without an array"


def test_an_artifact_with_open_dimensions_is_not_bundled(tmp_path: Path) -> None:
    model = with_drawn_weights("g (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }")
    hybridc.compile(model, tmp_path / "net.hyb", target=CPU, dims={"N": "1..3"})
    with pytest.raises(UsageError) as refused:
        write_bundle(tmp_path / "net.hyb", tmp_path / "bundle")
    assert refused.value.code == "HC564" and "(N)" in refused.value.what
    assert not (tmp_path / "bundle").exists()


def _other_bounds(manifest: dict[str, Any]) -> None:
    manifest["buckets"][0]["sizes"][0]["high"] = 5


def _other_order(manifest: dict[str, Any]) -> None:
    manifest["plans"].reverse()


def _no_buckets(manifest: dict[str, Any]) -> None:
    manifest["buckets"] = []


def _axis_that_is_not_there(manifest: dict[str, Any]) -> None:
    manifest["dimensions"][0]["axes"][0][1] = 7


def _other_output(manifest: dict[str, Any]) -> None:
    manifest["buckets"][0]["outputs"].pop()


def _sizes_of_no_bucket(manifest: dict[str, Any]) -> None:
    number = [each["name"] for each in manifest["dimensions"]].index("N")  # which has one bucket, and S two
    manifest["buckets"][0]["sizes"][number]["low"] += 1


@pytest.mark.parametrize(
    ("case", "edit"),
    [
        *(
            (("convolutions", CPU), edit)
            for edit in (_other_bounds, _other_order, _no_buckets, _axis_that_is_not_there, _other_output)
        ),
        (("encoder", CPU), _sizes_of_no_bucket),
    ],
    indirect=["case"],
)
def test_buckets_that_contradict_the_plans_are_refused(
    case: tuple[Session, onnx.ModelProto, dict[str, int]],
    edit: Callable[[dict[str, Any]], None],
    tmp_path: Path,
) -> None:
    session, _, _ = case
    path = tmp_path / "model.hyb"
    shutil.copytree(session.artifact.path, path)
    manifest = json.loads((path / "manifest.json").read_text())
    edit(manifest)
    (path / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(ArtifactError) as refused:
        hybridc.load(path)
    assert refused.value.code == "HC303"


@pytest.mark.parametrize("case", [("encoder", CPU)], indirect=True)
def test_what_buckets_share_is_stored_once(case: tuple[Session, onnx.ModelProto, dict[str, int]]) -> None:
    session, _, _ = case
    manifest = session.artifact.manifest
    places = [
        {w.tensor: w.offset_bytes for w in plan.host_weights if w.tensor.startswith("w")}
        for plan in manifest.plans
    ]
    assert len(places) == 2 and places[0] == places[1] and len(places[0]) >= 3
    names = [{k.function for k in graph.kernels} for graph in session.artifact.graphs]
    assert len(manifest.functions) < sum(map(len, names))


def test_a_model_of_an_old_opset_runs_at_any_size(tmp_path: Path) -> None:
    """Before opset 7 an attribute said along which axis an operand is broadcast."""
    random, info = np.random.default_rng(0), onnx.helper.make_tensor_value_info
    weight = random.standard_normal(3, np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "w"], ["y"], axis=1, broadcast=1)],
        "old",
        [info("x", 1, ["N", 3, "L"]), info("w", 1, [3])],
        [info("y", 1, ["N", 3, "L"])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 6)], ir_version=3)
    hybridc.compile(model, tmp_path / "old.hyb", target=CPU, dims={"N": "1..5:5", "L": "2..4:4"})
    with hybridc.load(tmp_path / "old.hyb") as session:
        for n, length in ((1, 2), (3, 4), (5, 3)):
            x = random.standard_normal((n, 3, length), np.float32)
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], x + weight[:, None])
