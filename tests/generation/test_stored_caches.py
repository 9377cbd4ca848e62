"""Decoders whose keys and values are stored in fewer bits than the model has, against onnxruntime."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import hybridc
from hybridc import models
from hybridc.cli import main
from hybridc.errors import UsageError
from hybridc.ir import Copy, Device
from hybridc.ir.plan import resident_pairs
from hybridc.report.decoder import decoder_lines, decoder_row
from tests.support.decoders import (
    CONTEXT,
    Rounding,
    appending,
    greedy,
    llama,
    logits_of,
    with_open_lengths,
)
from tests.support.integer_rows import numbers_of, rows_of
from tests.support.machines import EAGER_GPU

PROMPT = [5, 17, 200, 3, 99, 42, 8, 150, 77, 31, 64]
LENGTHS = {"past_sequence_length": CONTEXT, "total_sequence_length": CONTEXT}
pytestmark = pytest.mark.isa("avx2")
DECODERS: dict[str, tuple[onnx.ModelProto, dict[str, Any]]] = {
    "places": (with_open_lengths(), {"sequence": [1, 8], **LENGTHS}),
    "int4": (llama(), {"sequence": [1]}),
    "appending": (appending(), {"n": 1, "past": CONTEXT, "total": CONTEXT + 1}),
}


EXACT: Rounding = np.asarray
ROUNDED: dict[str, Rounding] = {
    "fp16": lambda cache: cache.astype(np.float16).astype(np.float32),
    "int8": lambda cache: numbers_of(rows_of(cache)),
}
DTYPES = {"fp16": "float16", "int8": "int8"}


class Stored(dict[str, Path]):
    """The decoders with caches of float16, and `integers` is `places` with caches of int8; each is compiled
    when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        kind = "int8" if name == "integers" else "fp16"
        model, sizes = DECODERS["places" if name == "integers" else name]
        self[name] = self.folder / f"{name}.hyb"
        hybridc.compile(model, self[name], target="avx2", dims=sizes, kv_cache=kind)
        return self[name]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Stored(tmp_path_factory.mktemp("stored"))


@pytest.mark.parametrize(
    "name", ["places", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int4", "appending"))]
)
def test_greedy_tokens_are_those_of_the_model(name: str, stored: dict[str, Path]) -> None:
    model = DECODERS[name][0]
    wanted = list(islice(greedy(model, PROMPT, in_places=name == "int4"), 100))
    with hybridc.load_generation(stored[name]) as session:
        assert [token for (token,) in session.generate([PROMPT], 100)] == wanted
    assert len(set(wanted)) > 5


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("places", "fp16"),
        pytest.param("appending", "fp16", marks=pytest.mark.slow),
        ("integers", "int8"),
    ],
)
def test_logits_are_as_near_as_those_of_a_cache_that_is_rounded_in_between(
    name: str, kind: str, stored: dict[str, Path]
) -> None:
    model, tokens = (
        DECODERS["places" if kind == "int8" else name][0],
        np.random.default_rng(1).integers(0, 200, 40).tolist(),
    )
    exact, rounded = (np.stack(list(logits_of(model, tokens, r))) for r in (EXACT, ROUNDED[kind]))
    with hybridc.load_generation(stored[name]) as session:
        found = np.stack([session.append([[token]])[0] for token in tokens])
    error, allowed = (np.sqrt(np.mean((each - exact) ** 2)) for each in (found, rounded))
    assert 0 < error <= 2 * allowed


@pytest.mark.parametrize(("name", "dtype"), [("places", "float16"), ("integers", "int8")])
def test_caches_are_inputs_and_outputs_of_this_type(name: str, dtype: str, stored: dict[str, Path]) -> None:
    with hybridc.load(stored[name]) as session:
        types = {node.name: node.type for node in (*session.get_inputs(), *session.get_outputs())}
    caches = {name for name in types if name.startswith(("past", "present"))}
    assert len(caches) == 8
    assert {types[name] for name in caches} == {f"tensor({dtype})"}
    assert types["logits"] == "tensor(float)"


@pytest.mark.parametrize("name", ["places", "integers"])
def test_rewind_fork_and_restore_go_on_as_a_new_session_would(
    name: str, stored: dict[str, Path], tmp_path: Path
) -> None:
    with hybridc.load_generation(stored[name]) as session:
        session.append([PROMPT])
        other = session.fork()
        session.append([[1, 2, 3]])
        session.rewind(len(PROMPT))
        session.save(tmp_path / "c.npz")
        found = [session.append([[7]]), other.append([[7]])]
        session.append([[8]])
        session.restore(tmp_path / "c.npz")
        found.append(session.append([[7]]))
    with hybridc.load_generation(stored[name]) as fresh:
        fresh.append([PROMPT])
        wanted = fresh.append([[7]])
    for each in found:
        np.testing.assert_array_equal(each, wanted)


def test_saved_caches_of_another_type_are_refused(
    stored: dict[str, Path], artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """`float32` of the other tests is the same model."""
    paths = {"float16": stored["places"], "int8": stored["integers"], "float32": artifacts["float32"]}
    for kind, path in paths.items():
        with hybridc.load_generation(path) as session:
            session.append([PROMPT])
            session.save(tmp_path / f"{kind}.npz")
    for kind, other in (("float16", "float32"), ("float32", "int8"), ("int8", "float16")):
        with hybridc.load_generation(paths[kind]) as session, pytest.raises(UsageError) as caught:
            session.restore(tmp_path / f"{other}.npz")
        assert caught.value.code == "HC582" and kind in str(caught.value)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> hybridc.Compiled:
    """With all caches in the memory of a GPU, and with some."""
    return hybridc.compile(
        llama(int4=False),
        tmp_path_factory.mktemp("gpu") / "m.hyb",
        target="cuda+avx2",
        dims={"sequence": [1]},
        gpu_memory=["15%", "90%"],
        machine=EAGER_GPU,
        plan_seconds=0.1,
        kv_cache="fp16",
    )


def test_tokens_are_those_of_the_model_on_a_gpu_too(on_gpu: hybridc.Compiled) -> None:
    wanted = list(islice(greedy(llama(int4=False), PROMPT, in_places=True), 60))
    on_both = [len(resident_pairs(g, p.steps)) for g, p in zip(on_gpu.graphs, on_gpu.plans, strict=True)]
    assert on_both[0] < on_both[1] == 4
    for plan in on_gpu.plans:
        budget, path = plan.budget_bytes, on_gpu.path
        assert path is not None and budget is not None
        with hybridc.load_generation(path, emulate_gpu="64MiB", gpu_memory=budget) as session:
            assert [token for (token,) in session.generate([PROMPT], 60)] == wanted
            assert session.memory()[Device.GPU].allocated_bytes <= budget


@pytest.fixture(scope="module", params=["cuda:sm_75+avx2", "cuda:sm_80+avx2"])
def integers_on_gpu(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> hybridc.Compiled:
    """Of one token and of eight, with all caches in the memory of a GPU, and with some. There are ways to
    tile it that would cut caches, of which none may be taken."""
    return hybridc.compile(
        with_open_lengths(),
        tmp_path_factory.mktemp("gpu") / "m.hyb",
        target=request.param,
        dims={"sequence": [1, 8], **LENGTHS},
        gpu_memory=["12%", "90%"],
        machine=EAGER_GPU,
        plan_seconds=0.1,
        kv_cache="int8",
    )


def test_caches_of_integers_stay_on_a_gpu(integers_on_gpu: hybridc.Compiled) -> None:
    """And in each run where they are."""
    graphs_and_plans = list(zip(integers_on_gpu.graphs, integers_on_gpu.plans, strict=True))
    budgets = sorted({plan.budget_bytes or 0 for _, plan in graphs_and_plans})
    assert len(budgets) == 2
    on_gpu = {budget: set[int]() for budget in budgets}
    for graph, plan in graphs_and_plans:
        on_gpu[plan.budget_bytes or 0].add(len(resident_pairs(graph, plan.steps)))
        caches = {name for pair in graph.caches for name in pair}
        assert {graph.tensor[name].dtype for name in caches} == {"int8"}
        assert not caches & {step.tensor for step in plan.steps if isinstance(step, Copy)}
        row = decoder_row(graph, plan)
        assert row is not None and row.cache_dtypes == ("int8",)
        assert sum(row.cache_bytes.values()) == 4 * 2 * CONTEXT * (16 + 4)  # caches, heads, positions, row
    small, large = (on_gpu[budget] for budget in budgets)
    assert large == {4} and max(small) < 4


def test_logits_of_integers_on_a_gpu_are_as_near(integers_on_gpu: hybridc.Compiled) -> None:
    """Eight tokens are read at once, the others one by one; near as those of onnxruntime with a cache that is
    rounded in between."""
    model, tokens = with_open_lengths(), np.random.default_rng(1).integers(0, 200, 40).tolist()
    exact, rounded = (np.stack(list(logits_of(model, tokens, r)))[7:] for r in (EXACT, ROUNDED["int8"]))
    allowed = np.sqrt(np.mean((rounded - exact) ** 2))
    path = integers_on_gpu.path
    assert path is not None
    for budget in {plan.budget_bytes for plan in integers_on_gpu.plans}:
        assert budget is not None
        with hybridc.load_generation(path, emulate_gpu="64MiB", gpu_memory=budget) as session:
            first = session.append([tokens[:8]])[0]
            found = np.stack([first, *(session.append([[token]])[0] for token in tokens[8:])])
            assert session.memory()[Device.GPU].allocated_bytes <= budget
        assert 0 < np.sqrt(np.mean((found - exact) ** 2)) <= 2 * allowed
        assert np.mean(found.argmax(-1) == rounded.argmax(-1)) > 0.9


def test_integers_on_a_gpu_are_rewound_forked_and_restored(
    integers_on_gpu: hybridc.Compiled, tmp_path: Path
) -> None:
    """In the smaller budget, where each device has some."""
    path = integers_on_gpu.path
    budget = min(plan.budget_bytes or 0 for plan in integers_on_gpu.plans)
    assert path is not None

    def opened() -> hybridc.GenerationSession:
        return hybridc.load_generation(path, emulate_gpu="64MiB", gpu_memory=budget)

    with opened() as session:
        session.append([PROMPT])
        session.save(tmp_path / "c.npz")
        other = session.fork()
        wanted = session.append([[7]])
        session.append([[1, 2, 3]])
        session.rewind(len(PROMPT))
        np.testing.assert_array_equal(session.append([[7]]), wanted)
        np.testing.assert_array_equal(other.append([[7]]), wanted)
    with opened() as session:
        session.restore(tmp_path / "c.npz")
        np.testing.assert_array_equal(session.append([[7]]), wanted)


@pytest.mark.parametrize(("tokens", "devices"), [(1, {Device.GPU, Device.CPU}), (16, {Device.CPU})])
def test_attention_that_a_gpu_has_no_tiles_for_is_left_to_the_cpu(tokens: int, devices: set[Device]) -> None:
    """It is one kernel all the same: nothing else reads rows of integers."""
    sizes = {"layers": 1, "hidden": 576, "heads": 2, "kv_heads": 1, "feed_forward": 32, "vocabulary": 50}
    model = models.build("llama", context=64, int4=False, **sizes)
    how: dict[str, Any] = {"dims": {"sequence": tokens}, "machine": EAGER_GPU, "plan_seconds": 0.02}
    planned = hybridc.plan(model, target="cuda+avx2", kv_cache="int8", **how)
    (graph,) = planned.graphs
    (kernel,) = (each for each in graph.kernels if each.function.startswith("attention"))
    assert set(kernel.devices) == devices


def test_a_plan_tells_the_bytes_of_caches(on_gpu: hybridc.Compiled) -> None:
    row = decoder_row(on_gpu.graphs[-1], on_gpu.plans[-1])
    assert row is not None
    assert row.cache_bytes == {Device.GPU: 4 * 2 * 2 * CONTEXT * 16}  # caches, bytes, heads, positions, depth
    assert row.cache_dtypes == ("float16",)
    assert "4 of float16" in decoder_lines(row)[0] and "256 B each" in decoder_lines(row)[0]


@pytest.mark.parametrize(
    ("target", "kind", "tolerance"),
    [
        pytest.param("avx2", "fp16", 2e-3, marks=pytest.mark.slow),
        ("avx2", "int8", 3e-2),
        pytest.param("cuda+avx2", "fp16", 2e-3, marks=pytest.mark.slow),
        ("cuda+avx2", "int8", 3e-2),
    ],
)
def test_a_prompt_of_many_tokens_reads_them(target: str, kind: str, tolerance: float, tmp_path: Path) -> None:
    """Of more queries than those that leave keys where they are."""
    model, tokens = with_open_lengths(), np.random.default_rng(2).integers(0, 200, 32).tolist()
    *_, exact = logits_of(model, tokens, EXACT)
    sizes, on_gpu = {"sequence": 32, **LENGTHS}, target != "avx2"
    more: dict[str, Any] = {"machine": EAGER_GPU, "plan_seconds": 0.02} if on_gpu else {}
    hybridc.compile(model, tmp_path / "m.hyb", target=target, dims=sizes, kv_cache=kind, **more)
    with hybridc.load_generation(tmp_path / "m.hyb", emulate_gpu="64MiB" if on_gpu else None) as session:
        found = session.append([tokens])[0]
    np.testing.assert_allclose(found, exact, rtol=0, atol=tolerance * np.abs(exact).max())


def test_a_model_without_caches_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        hybridc.plan(models.build("mlp", batch=2, inputs=8, hidden=8, layers=2, classes=4), kv_cache="fp16")
    assert caught.value.code == "HC539" and "--kv-cache" in str(caught.value)


def test_an_artifact_of_integers_tells_its_bytes() -> None:
    planned = hybridc.plan(llama(), target="avx2", dims={"sequence": 1}, kv_cache="int8")
    row = decoder_row(planned.graphs[-1], planned.plans[-1])
    assert row is not None and row.cache_dtypes == ("int8",)
    assert row.cache_bytes == {Device.CPU: 4 * 2 * CONTEXT * (16 + 4)}  # caches, heads, positions, row


@pytest.mark.parametrize("wrong", ["fp8", "", 16])
def test_other_types_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError) as caught:
        hybridc.plan(llama(), target="avx2", dims={"sequence": 1}, kv_cache=wrong)
    assert caught.value.code == "HC526"


def test_integers_need_places_in_a_cache() -> None:
    """Rows of a cache that grows are copied by others than attention."""
    model, sizes = DECODERS["appending"]
    with pytest.raises(UsageError) as caught:
        hybridc.plan(model, target="avx2", dims=sizes, kv_cache="int8")
    assert caught.value.code == "HC539"


def test_training_has_no_caches(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        hybridc.compile_training("m.onnx", tmp_path / "s", loss="mse", kv_cache="fp16")
    assert caught.value.code == "HC525"


def test_compare_feeds_the_reference_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(appending(), path)
    sizes = [word for size in ("n=1", "past=16", "total=17") for word in ("--dim", size)]
    command = ["compare", str(path), "--target", "avx2", *sizes, "--kv-cache"]
    assert main([*command, "fp16"]) == 0
    assert main([*command, "int8"]) == 2 and "error[HC500]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "kv_cache"), [pytest.param("3", [], marks=pytest.mark.slow), ("1", ["--kv-cache", "fp16"])]
)
def test_compare_has_the_reference_write_rows_into_the_past(
    tmp_path: Path, tokens: str, kv_cache: list[str]
) -> None:
    """Places behind the tokens keep what they hold, as where a generator shares its memory."""
    path = tmp_path / "m.onnx"
    sizes = {"layers": 1, "hidden": 64, "heads": 2, "kv_heads": 1, "feed_forward": 96, "vocabulary": 50}
    onnx.save(models.build("llama", context=24, int4=False, **sizes), path)
    assert main(["compare", str(path), "--target", "avx2", "--dim", f"sequence={tokens}", *kv_cache]) == 0
