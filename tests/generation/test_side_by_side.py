"""Decoders whose large products both devices compute side by side, on the emulated GPU."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import hybridc
from hybridc.ir import Copy, Device, Run
from hybridc.passes.tiling import side_by_side
from hybridc.results import Compiled
from tests.support.decoders import greedy, llama
from tests.support.machines import SLOW_MEMORIES

PROMPT = [5, 17, 200, 3, 99, 42, 8, 150, 77, 31, 64]
TOKENS = 60
pytestmark = pytest.mark.isa("avx2")

CASES: dict[str, dict[str, Any]] = {
    "one size, float32": {"int4": False, "dims": {"sequence": [1]}, "gpu_memory": "60%"},
    "prompts too, int4": {"int4": True, "dims": {"sequence": [1, 4]}, "gpu_memory": "50%"},
}


@pytest.fixture(scope="module", params=CASES)
def decoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Compiled, bool]:
    case = CASES[request.param]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(side_by_side, "_LEAST_BYTES", 1)
        patched.setattr(side_by_side, "_STEP", 16)
        compiled = hybridc.compile(
            llama(int4=case["int4"]),
            tmp_path_factory.mktemp("decoder") / "m.hyb",
            target="cuda+avx2",
            dims=case["dims"],
            gpu_memory=case["gpu_memory"],
            machine=SLOW_MEMORIES,
            plan_seconds=0.1,
        )
    return compiled, case["int4"]


def test_each_device_reads_its_parts_of_the_weights(decoder: tuple[Compiled, bool]) -> None:
    compiled, _ = decoder
    for graph, plan in zip(compiled.graphs, compiled.plans, strict=True):
        parts = {k.name: [n for n in k.inputs if n.rsplit(".", 1)[-1].count("_") == 2] for k in graph.kernels}
        devices = [s.device for s in plan.steps if isinstance(s, Run) and parts[s.kernel]]
        assert {Device.GPU, Device.CPU} == set(devices)
        caches = {name for pair in graph.caches for name in pair}
        assert not caches & {step.tensor for step in plan.steps if isinstance(step, Copy)}
        assert plan.budget_bytes is not None and plan.arena_bytes(Device.GPU) <= plan.budget_bytes


def test_tokens_are_those_of_onnxruntime_within_the_budget(decoder: tuple[Compiled, bool]) -> None:
    compiled, int4 = decoder
    budget_bytes = compiled.plans[0].budget_bytes
    assert compiled.path is not None and budget_bytes is not None
    wanted = list(islice(greedy(llama(int4=int4), PROMPT, in_places=True), TOKENS))
    session = hybridc.load_generation(Path(compiled.path), emulate_gpu="64MiB", gpu_memory=budget_bytes)
    with session:
        assert [token for (token,) in session.generate([PROMPT], TOKENS)] == wanted
        assert 0 < session.memory()[Device.GPU].allocated_bytes <= budget_bytes
