"""Real networks on every target: errors against ONNX Runtime, bytes against the budget."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from hybridc.cli import main
from hybridc.ir import Device
from hybridc.ir.verify import verify
from hybridc.models import build
from hybridc.options import CompileOptions, parse_budget
from hybridc.passes.import_model import import_model
from hybridc.passes.pipeline import run_stages
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes
from hybridc.progress import NullProgress
from hybridc.targets import parse_target
from tests.support.light_models import light_model

LIGHT = ("squeezenet", "resnet50", "inception_v1", "densenet121")
SUITE = (*LIGHT, "unet", "bert")
BUDGETS = ("100%", "50%", "25%")
TOLERANCE = 1e-4
BRIEF = Effort(seconds=0.02)
TARGETS = [
    pytest.param(t, marks=pytest.mark.isa(t.rpartition("+")[2])) for t in ("avx2", "avx512", "cuda+avx2")
]


def suite_model(name: str) -> onnx.ModelProto:
    return light_model(name) if name in LIGHT else build(name)


def compare(name: str, target: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict]:
    """What `hybridc compare` says; every GPU budget runs on an emulated GPU of exactly that size."""
    path = folder / f"{name}.onnx"
    path.write_bytes(suite_model(name).SerializeToString())
    command = ["compare", str(path), "--target", target, "--json"]
    if target.startswith("cuda"):
        command += ["--gpu-memory", ",".join(BUDGETS), "--emulate-gpu"]
    assert main(command) == 0
    return json.loads(capsys.readouterr().out)["comparisons"]


def assert_promises_kept(rows: list[dict]) -> None:
    for row in rows:
        assert row["max_rel_error"] <= TOLERANCE
        assert row["budget_bytes"] is None or row["allocated_bytes"] <= row["budget_bytes"]


@pytest.mark.isa("avx2")
def test_squeezenet_is_right(tmp_path, capsys):
    assert_promises_kept(compare("squeezenet", "avx2", tmp_path, capsys))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SUITE)
def test_every_network_is_right_within_every_budget(name, target, tmp_path, capsys):
    assert_promises_kept(compare(name, target, tmp_path, capsys))


LONG = ("densenet121", "bert", "inception_v1", "resnet50", "unet")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in SUITE]
)
def test_arenas_stay_near_the_live_bytes_bound(name):
    options = CompileOptions(target=parse_target("cuda+avx2"))
    graph = run_stages(import_model(suite_model(name), options)[1], NullProgress(), stop_after="graph").graph
    assert graph is not None
    plans = [make_plan(graph, options.machine, None, (Device.CPU,))]
    for budget in BUDGETS:
        size_bytes = parse_budget(budget).resolve(all_gpu_peak_bytes(graph, options.machine))
        plans.append(make_plan(graph, options.machine, size_bytes, (Device.GPU, Device.CPU), effort=BRIEF))
    for plan in plans:
        verify(graph, plan)
        for arena in plan.arenas:
            assert arena.size_bytes <= 1.01 * arena.lower_bound_bytes


ON_CPU, ON_BOTH = ("resnet18", "bert", "atacworks"), ("mobilenet_v2", "super_resolution", "lenet", "mlp")
"""Networks of the fast suite."""


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "avx2") for name in ON_CPU),
        *((name, "cuda+avx512") for name in ON_BOTH),
        *(pytest.param(name, "avx2", marks=pytest.mark.slow) for name in ("resnet50", *ON_BOTH)),
        *(pytest.param(name, "cuda+avx512", marks=pytest.mark.slow) for name in ("resnet50", *ON_CPU)),
    ],
)
def test_no_kernel_is_left_to_the_fallback(name, target):
    options = CompileOptions(target=parse_target(target))
    # all layers of bert have the same kernels
    model = build("bert", layers=2) if name == "bert" else suite_model(name)
    done = run_stages(import_model(model, options)[1], NullProgress(), stop_after="schedule")
    assert done.scheduled is not None
    left = {key: s.rule for key, s in done.scheduled.items() if s.rule == "fallback"}
    assert left == {}
