"""Decoders on the emulated GPU: their caches lie where they are, in its memory or in the host's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnxruntime.transformers.float16 import convert_float_to_float16

import hybridc
from hybridc import emulator
from hybridc.emulator import launches_of_steps
from hybridc.generation import GenerationSession
from hybridc.ir import Copy, Device, Graph, Plan, Run
from hybridc.ir.plan import resident_pairs
from hybridc.machine import load_machine
from hybridc.report.decoder import decoder_lines, decoder_row
from hybridc.results import Compiled
from tests.support.decoders import CONTEXT, greedy, llama, with_open_lengths
from tests.support.machines import EAGER_GPU

GPU_MEMORY = "64MiB"
SHARES = ("25%", "50%", "75%")
PROMPT = [5, 17, 200, 3, 99, 42, 8, 150, 77, 31, 64]
TOKENS = 200
pytestmark = pytest.mark.isa("avx2")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """With a plan for each of `SHARES` of what the decoder needs with its whole cache on the GPU."""
    return hybridc.compile(
        llama(int4=False),
        tmp_path_factory.mktemp("decoder") / "m.hyb",
        target="cuda+avx2",
        dims={"sequence": [1]},
        gpu_memory=SHARES,
        machine=EAGER_GPU,
        plan_seconds=0.05,
    )


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    return list(islice(greedy(llama(int4=False), PROMPT, in_places=True), TOKENS))


# of the second one all caches are on the GPU, as they are of the last
@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.slow), 2], ids=SHARES)
def planned(request: pytest.FixtureRequest, decoder: Compiled) -> tuple[Graph, Plan]:
    return decoder.graphs[request.param], decoder.plans[request.param]


@pytest.fixture
def session(decoder: Compiled, planned: tuple[Graph, Plan]) -> Iterator[GenerationSession]:
    budget = planned[1].budget_bytes
    with hybridc.load_generation(path_of(decoder), emulate_gpu=GPU_MEMORY, gpu_memory=budget) as loaded:
        yield loaded


def path_of(decoder: Compiled) -> Path:
    assert decoder.path is not None
    return decoder.path


def tokens_of(session: GenerationSession, most: int) -> list[int | None]:
    return [token for (token,) in session.generate([PROMPT], most)]


def test_budgets_have_caches_here_and_there(decoder: Compiled) -> None:
    """So that the tests below are about both."""
    pairs = zip(decoder.graphs, decoder.plans, strict=True)
    on_gpu = [len(resident_pairs(graph, plan.steps)) for graph, plan in pairs]
    assert on_gpu[0] < on_gpu[2] == 4 and all(len(graph.caches) == 4 for graph in decoder.graphs)


def test_a_run_copies_no_cache(planned: tuple[Graph, Plan]) -> None:
    graph, plan = planned
    names = {name for pair in graph.caches for name in pair}
    assert not names & {step.tensor for step in plan.steps if isinstance(step, Copy)}
    for pair in graph.caches:
        places = [[(b.device, b.offset_bytes) for b in plan.buffers if b.tensor == name] for name in pair]
        assert len(places[0]) == 1 and places[0] == places[1]


def test_reports_say_where_the_caches_are(planned: tuple[Graph, Plan]) -> None:
    graph, plan = planned
    row = decoder_row(graph, plan)
    assert row is not None
    on_gpu = resident_pairs(graph, plan.steps)
    expected = {Device.GPU: len(on_gpu), Device.CPU: 4 - len(on_gpu)}
    assert row.caches == {device: count for device, count in expected.items() if count}
    each_bytes = 4 * 2 * CONTEXT * 16  # float32, heads, positions, depth
    assert row.cache_bytes == {device: count * each_bytes for device, count in row.caches.items()}
    assert (row.positions, row.sequences, row.tokens) == (CONTEXT, 1, 1)
    assert row.tokens_per_s == pytest.approx(1e6 / plan.makespan_us)
    text = "\n".join(decoder_lines(row))
    assert f"{expected[Device.GPU]} of float32 on the GPU" in text or not on_gpu
    assert "room for 256 tokens of 512 B each" in text and "A run reads 1 new token:" in text


def test_others_ways_stand_beside_the_plan(planned: tuple[Graph, Plan]) -> None:
    row = decoder_row(*planned, load_machine(EAGER_GPU))
    assert row is not None
    split, streaming, alone = row.others
    assert (split.name, streaming.name, alone.name) == ("layer split", "streaming", "CPU alone")
    assert split.layers == 2 and split.gpu_layers in (0, 1, 2)
    assert alone.makespan_us and alone.tokens_per_s == pytest.approx(1e6 / alone.makespan_us)
    assert f"({split.gpu_layers} of 2 layers on the GPU)" in decoder_lines(row)[-1]


def test_tokens_are_those_of_onnxruntime_within_the_budget(
    session: GenerationSession, planned: tuple[Graph, Plan], wanted: list[int]
) -> None:
    assert tokens_of(session, TOKENS) == wanted
    assert planned[1].budget_bytes is not None
    memory = session.memory()[Device.GPU]
    assert 0 < memory.allocated_bytes <= planned[1].budget_bytes
    assert len(set(wanted)) > 5


@pytest.mark.parametrize("steps", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_many_steps_allocate_nothing_and_copy_what_is_planned(
    session: GenerationSession, planned: tuple[Graph, Plan], steps: int
) -> None:
    graph, plan = planned
    session.append([PROMPT])
    session.rewind(1)
    before = emulator.statistics()
    for number in range(steps):
        if len(session.sequences[0]) == CONTEXT:
            session.rewind(1)
        session.append([[number % 100]])
    after = emulator.statistics()
    assert after.allocations == before.allocations
    assert after.used_bytes == before.used_bytes == session.memory()[Device.GPU].allocated_bytes
    copies = [step for step in plan.steps if isinstance(step, Copy)]
    for name, device in (("h2d_bytes", Device.GPU), ("d2h_bytes", Device.CPU)):
        bytes_of_a_step = sum(graph.tensor[s.tensor].size_bytes for s in copies if s.target is device)
        assert getattr(after, name) - getattr(before, name) == steps * bytes_of_a_step


@pytest.mark.slow  # g++ takes long for kernels that tell of each access
def test_a_step_writes_only_new_rows(session: GenerationSession, planned: tuple[Graph, Plan]) -> None:
    graph, plan = planned
    # launches of CUDA graphs, which later runs are, cannot be counted
    launches = emulator.count_launches(lambda: session.append([PROMPT[:1]]))
    found = []
    for position, counts in launches_of_steps(graph, plan, launches).items():
        step = plan.steps[position]
        if isinstance(step, Run) and graph.kernel[step.kernel].appends:
            found += [32 * each.written_sectors for each in counts]
    # two heads of 16 numbers
    assert found == [2 * 16 * 4] * len(resident_pairs(graph, plan.steps))


def test_rewind_and_fork_go_on_as_a_new_session_would(session: GenerationSession, decoder: Compiled) -> None:
    session.append([PROMPT])
    other = session.fork()
    session.append([[1, 2, 3]])
    session.rewind(len(PROMPT) - 2)
    both = session.append([PROMPT[-2:]]), other.append([[7]])
    again = session.append([[7]])
    with hybridc.load_generation(path_of(decoder), emulate_gpu=GPU_MEMORY) as fresh:
        expected = fresh.append([PROMPT]), fresh.append([[7]])
    for found, known in zip((*both, again), (*expected, expected[1]), strict=True):
        np.testing.assert_allclose(found, known, rtol=0, atol=1e-5)


def test_an_ordinary_run_is_fed_and_returns_the_caches(
    decoder: Compiled, planned: tuple[Graph, Plan]
) -> None:
    """As without a GPU, whatever ran before."""
    budget = planned[1].budget_bytes
    random = np.random.default_rng(0)
    with hybridc.load(path_of(decoder), emulate_gpu=GPU_MEMORY, gpu_memory=budget) as session:
        pasts = {
            node.name: random.standard_normal(node.shape).astype(np.float32)
            for node in session.get_inputs()
            if node.name.startswith("past")
        }
        mask = (np.arange(CONTEXT) < 8).astype(np.int64).reshape(1, -1)
        feeds = {"input_ids": np.array([[3]]), "attention_mask": mask, **pasts}
        first, second = session.run(None, feeds), session.run(None, feeds)
        names = [node.name for node in session.get_outputs()]
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    for name, past in pasts.items():
        present = first[names.index(name.replace("past_key_values", "present"))]
        np.testing.assert_array_equal(np.delete(present, 7, axis=2), np.delete(past, 7, axis=2))
        assert (present[:, :, 7] != past[:, :, 7]).any()


@pytest.mark.slow
def test_caches_of_16_bits_stay_in_place_too(tmp_path: Path) -> None:
    model = convert_float_to_float16(llama(int4=False), disable_shape_infer=True)
    made = hybridc.compile(
        model,
        tmp_path / "m.hyb",
        target="cuda+avx2",
        dims={"sequence": 1},
        gpu_memory="60%",
        machine=EAGER_GPU,
        plan_seconds=0.02,
    )
    [graph], [plan] = made.graphs, made.plans
    assert len(graph.caches) == len(resident_pairs(graph, plan.steps)) == 4
    random = np.random.default_rng(0)
    oracle = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    mask = (np.arange(CONTEXT) < 8).astype(np.int64).reshape(1, -1)
    feeds = {"input_ids": np.array([[3]]), "attention_mask": mask} | {
        node.name: random.standard_normal(node.shape).astype(np.float16)
        for node in oracle.get_inputs()
        if node.name.startswith("past")
    }
    with hybridc.load(tmp_path / "m.hyb", emulate_gpu=GPU_MEMORY) as session:
        found = session.run(None, feeds)
    for one, other in zip(found, oracle.run(None, feeds), strict=True):
        # behind these a present that is no past's buffer has zeros in onnxruntime
        ours, theirs = (
            (each if each.ndim < 4 else each[:, :, :8]).astype(np.float32) for each in (one, other)
        )
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=4e-3 * np.abs(theirs).max())


@pytest.mark.slow
def test_runs_of_other_lengths_take_the_cache_with_them(tmp_path: Path) -> None:
    lengths = {"past_sequence_length": CONTEXT, "total_sequence_length": CONTEXT}
    hybridc.compile(
        with_open_lengths(),
        tmp_path / "m.hyb",
        target="cuda+avx2",
        dims={"sequence": [1, 8], **lengths},
        gpu_memory="75%",
        machine=EAGER_GPU,
        plan_seconds=0.05,
    )
    expected = list(islice(greedy(with_open_lengths(), PROMPT, in_places=False), 40))
    with hybridc.load_generation(tmp_path / "m.hyb", emulate_gpu=GPU_MEMORY) as session:
        graphs = [view.artifact for view in session._decoder.session._plans]
        assert all(resident_pairs(each.graph, each.plan.steps) for each in graphs)
        assert tokens_of(session, 20) == expected[:20]
        session.rewind(len(PROMPT) + 3)
        session.append([[*expected[3:15]]])  # eight and four
        assert [token for (token,) in session.generate([[expected[15]]], 20)] == expected[16:36]
