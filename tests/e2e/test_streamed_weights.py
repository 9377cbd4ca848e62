"""Plans that stream weights, offload, fetch again and recompute, run on the emulated GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hybridc
from hybridc import emulator
from hybridc.artifact.load import open_artifact
from hybridc.ir import Copy, Device, Graph, Plan, Role
from hybridc.machine import Machine
from hybridc.models import build
from hybridc.passes.planner.emit.insert_copies import insert_copies
from hybridc.passes.planner.emit.reuse_buffers import reuse_buffers
from hybridc.passes.planner.make_plans import assemble
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import problem_of
from hybridc.passes.planner.model.simulate import simulate
from hybridc.runtime import load
from tests.support.given_plans import planned_by
from tests.support.light_models import random_feeds
from tests.support.random_graphs import graphs
from tests.support.random_steps import random_steps

TARGET = "cuda:sm_75+avx2"
BOTH = (Device.GPU, Device.CPU)
CAP_BYTES = 64 << 20
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    emulator.start(CAP_BYTES)
    yield
    emulator.reset()
    emulator.start(CAP_BYTES)


def expected(model: onnx.ModelProto) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, random_feeds(model))


def assert_close(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for result, right in zip(got, wanted, strict=True):
        scale = max(np.abs(right).max(initial=0.0), 1e-3)
        assert np.abs(result - right).max(initial=0.0) <= TOLERANCE * scale


def stream_all(budget_bytes: int, graph: Graph, machine: Machine) -> Plan:
    """All kernels on the GPU, activations stay there, and no weight does."""
    problem = problem_of(graph, machine, budget_bytes)
    keep = tuple(not problem.is_weight[gap.tensor] for gap in problem.gaps)
    outcome = simulate(problem, Decisions((False,) * problem.kernel_count, keep))
    assert outcome.feasible
    spans = [(event.start_us, event.end_us) for event in outcome.events]
    steps = reuse_buffers(graph, insert_copies(graph, problem, outcome), BOTH, spans)
    return assemble(graph, machine, budget_bytes, *steps)


@pytest.fixture(scope="module")
def perceptron() -> onnx.ModelProto:
    return build("mlp", batch=8, inputs=256, hidden=256, layers=10, classes=256)


@pytest.fixture(scope="module")
def streamed(perceptron: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose weights are three times its budget."""
    weight_bytes = sum(4 * int(np.prod(w.dims)) for w in perceptron.graph.initializer)
    path = tmp_path_factory.mktemp("streamed") / "mlp.hyb"
    with planned_by(lambda graph, machine: stream_all(weight_bytes // 3, graph, machine)):
        hybridc.compile(perceptron, path, target=TARGET)
    return path


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(
    ("host_memory_bytes", "lazy_streams"),
    [
        (None, False),
        (256 << 10, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((None, True), (256 << 10, False))),
    ],
)
def test_weights_of_three_times_the_budget_stream_through_it(
    streamed: Path, perceptron: onnx.ModelProto, lazy_streams: bool, host_memory_bytes: int | None
) -> None:
    artifact = open_artifact(streamed)
    plan = artifact.plan
    weights = [t.size_bytes for t in artifact.graph.tensors if t.role is Role.WEIGHT]
    assert plan.budget_bytes is not None and sum(weights) >= 3 * plan.budget_bytes
    assert sum(isinstance(step, Copy) for step in plan.steps) >= len(weights)
    emulator.start(plan.budget_bytes, lazy_streams=lazy_streams)
    emulator.reset_peak()
    with load(streamed, host_memory_bytes=host_memory_bytes) as session:
        for _ in range(2):
            assert_close(session.run(None, random_feeds(perceptron)), expected(perceptron))
        memory = session.memory()
    assert emulator.statistics().peak_bytes == plan.arena_bytes(Device.GPU) <= plan.budget_bytes
    assert memory[Device.GPU].planned_bytes == memory[Device.GPU].allocated_bytes
    held_bytes = memory[Device.CPU].allocated_bytes + memory[Device.CPU].staging_bytes
    assert held_bytes <= (host_memory_bytes or 2 * sum(weights))
    assert (memory[Device.CPU].staging_bytes < sum(weights)) == (host_memory_bytes is not None)


@pytest.mark.isa("avx2")
@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(graphs(), st.randoms(use_true_random=False))
def test_random_steps_of_all_kinds_run_right(model: onnx.ModelProto, random: Random) -> None:
    emulator.start(CAP_BYTES, lazy_streams=True)

    def make(graph: Graph, machine: Machine) -> Plan:
        return assemble(graph, machine, None, *reuse_buffers(graph, random_steps(graph, random), BOTH))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.hyb"
        with planned_by(make):
            hybridc.compile(model, path, target=TARGET)
        with load(path, host_memory_bytes=None) as session:
            assert_close(session.run(None, random_feeds(model)), expected(model))
