"""Decoders of which both devices compute a part, of large products and of heads, on the emulated GPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import onnx
import pytest

import hybridc
from hybridc.ir import Copy, Device, Run
from hybridc.passes.tiling import side_by_side
from hybridc.report.decoder import decoder_lines, decoder_row
from hybridc.results import Compiled
from tests.support.decoders import CONTEXT, greedy, llama, logits_of
from tests.support.integer_rows import numbers_of, rows_of
from tests.support.machines import SLOW_MEMORIES

PROMPT = [5, 17, 200, 3, 99, 42, 8, 150, 77, 31, 64]
TOKENS = 60
pytestmark = pytest.mark.isa("avx2")


@dataclass(frozen=True)
class Case:
    """What is compiled, and within which share of what it needs."""

    lengths: tuple[int, ...]
    gpu_memory: str
    int4: bool = True
    batch: int = 1
    kv_cache: str | None = None

    def model(self) -> onnx.ModelProto:
        return llama(int4=self.int4, batch=self.batch)


CASES = {
    "one length, float32, two sequences": Case((1,), "60%", int4=False, batch=2),
    "two lengths, int4, caches in float16": Case((1, 4), "55%", kv_cache="fp16"),
}
Decoder = tuple[Compiled, Case]


@pytest.fixture(scope="module", params=CASES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    case = CASES[request.param]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(side_by_side, "_LEAST_BYTES", 1)
        patched.setattr(side_by_side, "_STEP", 16)
        compiled = hybridc.compile(
            case.model(),
            tmp_path_factory.mktemp("decoder") / "m.hyb",
            target="cuda+avx2",
            dims={"sequence": list(case.lengths)},
            gpu_memory=case.gpu_memory,
            machine=SLOW_MEMORIES,
            plan_seconds=0.1,
            kv_cache=case.kv_cache,
        )
    return compiled, case


def opened(decoder: Decoder) -> hybridc.GenerationSession:
    compiled, _ = decoder
    assert compiled.path is not None
    budget_bytes = compiled.plans[0].budget_bytes
    return hybridc.load_generation(Path(compiled.path), emulate_gpu="64MiB", gpu_memory=budget_bytes)


def test_each_device_reads_its_parts_of_the_weights(decoder: Decoder) -> None:
    compiled, _ = decoder
    for graph, plan in zip(compiled.graphs, compiled.plans, strict=True):
        parts = {k.name: [n for n in k.inputs if n.rsplit(".", 1)[-1].count("_") == 2] for k in graph.kernels}
        devices = [s.device for s in plan.steps if isinstance(s, Run) and parts[s.kernel]]
        assert {Device.GPU, Device.CPU} == set(devices)
        caches = {name for pair in graph.caches for name in pair}
        assert not caches & {step.tensor for step in plan.steps if isinstance(step, Copy)}
        assert plan.budget_bytes is not None and plan.arena_bytes(Device.GPU) <= plan.budget_bytes


def test_each_device_has_the_caches_of_its_heads(decoder: Decoder) -> None:
    compiled, _ = decoder
    for graph, plan in zip(compiled.graphs, compiled.plans, strict=True):
        seconds = {other for _, other in graph.parts}
        assert len(graph.parts) == 8 and len(graph.caches) == 8  # two layers, keys and values, in and out
        ran = {step.kernel: step.device for step in plan.steps if isinstance(step, Run)}
        where = {new: ran[graph.kernels[graph.producer[new]].name] for _, new in graph.caches}
        assert {device for name, device in where.items() if name in seconds} == {Device.CPU}
        row = decoder_row(graph, plan)
        assert row is not None and row.is_cut and sum(row.caches.values()) == 8
        assert "divided between both devices" in decoder_lines(row)[0]


def test_tokens_are_those_of_onnxruntime_within_the_budget(decoder: Decoder) -> None:
    compiled, case = decoder
    wanted = list(islice(greedy(llama(int4=case.int4), PROMPT, in_places=True), TOKENS))
    with opened(decoder) as session:
        found = list(session.generate([PROMPT] * case.batch, TOKENS))
        assert found == [(token,) * case.batch for token in wanted]
        memory = session.memory()[Device.GPU]
        assert compiled.plans[0].budget_bytes is not None
        assert 0 < memory.allocated_bytes <= compiled.plans[0].budget_bytes


def test_caches_in_parts_are_saved_forked_and_rewound(decoder: Decoder, tmp_path: Path) -> None:
    _, case = decoder
    with opened(decoder) as session:
        session.append([PROMPT] * case.batch)
        session.save(tmp_path / "c.npz")
        other = session.fork()
        wanted = session.append([[7]] * case.batch)
        session.append([[9]] * case.batch)
        np.testing.assert_array_equal(other.append([[7]] * case.batch), wanted)
        other.rewind(len(PROMPT))
        np.testing.assert_array_equal(other.append([[7]] * case.batch), wanted)
    with opened(decoder) as session:
        session.restore(tmp_path / "c.npz")
        np.testing.assert_array_equal(session.append([[7]] * case.batch), wanted)


def test_rows_of_integers_are_divided_by_heads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Logits are as near to onnxruntime's as where it rounds a cache between its runs."""
    monkeypatch.setattr(side_by_side, "_LEAST_BYTES", 1)
    monkeypatch.setattr(side_by_side, "_STEP", 16)
    compiled = hybridc.compile(
        llama(int4=False, dynamic_context=True),
        tmp_path / "m.hyb",
        target="cuda+avx2",
        dims={"sequence": 1, "past_sequence_length": CONTEXT, "total_sequence_length": CONTEXT},
        gpu_memory="60%",
        machine=SLOW_MEMORIES,
        plan_seconds=0.1,
        kv_cache="int8",
    )
    (graph,), (plan,) = compiled.graphs, compiled.plans
    assert len(graph.parts) == 8 and len(graph.caches) == 8
    caches = {name for pair in graph.caches for name in pair}
    assert {graph.tensor[name].dtype for name in caches} == {"int8"}
    row = decoder_row(graph, plan)
    assert row is not None and row.is_cut and {Device.GPU, Device.CPU} == set(row.caches)
    tokens = np.random.default_rng(4).integers(0, 200, 24).tolist()
    model = llama(int4=False, dynamic_context=True)
    exact, rounded = (
        np.stack(list(logits_of(model, tokens, rounding)))
        for rounding in (np.asarray, lambda cache: numbers_of(rows_of(cache)))
    )
    assert compiled.path is not None
    with hybridc.load_generation(compiled.path, emulate_gpu="64MiB") as session:
        found = np.stack([session.append([[token]])[0] for token in tokens])
    error, allowed = (np.sqrt(np.mean((each - exact) ** 2)) for each in (found, rounded))
    assert 0 < error <= 2 * allowed


def test_users_see_whole_caches(decoder: Decoder) -> None:
    """Fed to a run and returned by it, they are what a compilation for the CPU makes of them."""
    compiled, case = decoder
    assert compiled.path is not None
    alone = hybridc.compile(
        case.model(),
        Path(compiled.path).with_name("cpu.hyb"),
        target="avx2",
        dims={"sequence": [1]},
        kv_cache=case.kv_cache,
    )
    assert alone.path is not None
    random = np.random.default_rng(3)
    with (
        hybridc.load(alone.path) as wanted,
        hybridc.load(compiled.path, emulate_gpu="64MiB") as session,
    ):
        feeds = {}
        for node in wanted.get_inputs():
            cache = random.standard_normal(node.shape).astype("float16" if case.kv_cache else "float32")
            feeds[node.name] = cache if node.name.startswith("past") else np.ones(node.shape, "int64")
        feeds["attention_mask"][:, CONTEXT // 2 :] = 0
        names = [node.name for node in session.get_outputs()]
        for name, found, expected in zip(
            names, session.run(names, feeds), wanted.run(names, feeds), strict=True
        ):
            assert found.shape == expected.shape and found.dtype == expected.dtype
            atol = (2e-3 if case.kv_cache else 1e-4) * np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=atol, err_msg=name)
