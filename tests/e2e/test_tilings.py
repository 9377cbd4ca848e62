"""Budgets for which a network is cut up in different ways, or not: in one artifact, and one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import hybridc
from hybridc import emulator
from hybridc.artifact.load import open_artifact
from hybridc.cli import main
from hybridc.compiler import import_model
from hybridc.ir import Device
from hybridc.machine import load_machine, machine_to_json
from hybridc.models import build
from hybridc.options import Budget, CompileOptions
from hybridc.passes.pipeline import run_stages
from hybridc.progress import NullProgress
from hybridc.targets import parse_target
from tests.support.light_models import random_feeds
from tests.support.tiled import held_bytes

TARGET = "cuda:sm_75+avx2"
PERCENTS = (50, 100)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    yield
    if emulator.is_active():  # tests that only plan may be all that a worker runs
        emulator.reset()


NETWORKS: dict[str, dict[str, int]] = {
    "mlp": {"inputs": 64, "hidden": 128, "layers": 2, "classes": 16},
    "unet": {"size": 32, "width": 4, "levels": 1},
}


@pytest.fixture(scope="module", params=["mlp", pytest.param("unet", marks=pytest.mark.slow)])
def network(request: pytest.FixtureRequest) -> onnx.ModelProto:
    """Tiles of convolutions run in test_tiled_models.py, too."""
    return build(request.param, **NETWORKS[request.param])


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For a machine on which even small kernels are better run on the GPU."""
    data = machine_to_json(load_machine("laptop-4gb"))
    data["cpu"] |= {"peak_gflops": 1, "launch_us": 100}
    data["gpu"] |= {"launch_us": 0.1}
    machine = tmp_path_factory.mktemp("machine") / "slow.json"
    machine.write_text(json.dumps(data))
    return {"target": TARGET, "machine": machine, "plan_seconds": 0.05}


@pytest.fixture(scope="module")
def artifact(
    network: onnx.ModelProto, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("tilings") / "network.hyb"
    hybridc.compile(network, path, gpu_memory=",".join(f"{p}%" for p in PERCENTS), **options)
    return path


@pytest.mark.isa("avx2")
def test_ways_to_cut_a_network_up_share_the_bytes_of_its_weights() -> None:
    model = build("mlp", inputs=256, hidden=512, layers=3, classes=64)
    options = CompileOptions(target=parse_target(TARGET), gpu_memory=(Budget(percent=100),))
    compilation = import_model(model, options)[1]
    done = run_stages(compilation, NullProgress(), stop_after="tile")
    model_bytes = held_bytes(compilation.program.weights.values())
    assert sum(weight.nbytes for weight in done.library.weights.values()) > 4 * model_bytes
    assert held_bytes(done.library.weights.values()) <= 1.05 * model_bytes


@pytest.mark.isa("avx2")
def test_each_plan_runs_the_graph_it_is_of(network: onnx.ModelProto, artifact: Path) -> None:
    opened = open_artifact(artifact)
    assert len({len(graph.kernels) for graph in opened.graphs}) > 1
    feeds = random_feeds(network)
    session = onnxruntime.InferenceSession(network.SerializeToString(), providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, feeds)
    for number, plan in enumerate(opened.plans):
        assert plan.budget_bytes is not None
        emulator.start(plan.budget_bytes, lazy_streams=True)
        emulator.reset_peak()
        with hybridc.load(artifact, gpu_memory=f"{plan.budget_bytes}B") as loaded:
            assert loaded.artifact.graph == opened.graphs[number]
            (got,) = loaded.run(None, feeds)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
        assert emulator.statistics().peak_bytes == plan.arena_bytes(Device.GPU)


@pytest.mark.isa("avx2")
def test_weights_are_stored_once_for_all_graphs(artifact: Path) -> None:
    offsets: dict[tuple[str, int, tuple[int, ...]], set[int]] = {}
    for stored in open_artifact(artifact).manifest.plans:
        for weight in (*stored.host_weights, *stored.streamed_weights, *stored.gpu_weights):
            key = weight.tensor, weight.layout, weight.shape
            offsets.setdefault(key, set()).add(weight.offset_bytes)
    assert offsets and all(len(places) == 1 for places in offsets.values())


@pytest.mark.slow
@pytest.mark.isa("avx2")
def test_more_memory_is_never_slower_and_a_budget_alone_has_the_same_plan(
    network: onnx.ModelProto, artifact: Path, options: dict[str, Any]
) -> None:
    opened = open_artifact(artifact)
    times = [plan.makespan_us for plan in opened.plans]
    assert times == sorted(times, reverse=True)
    alone = hybridc.plan(network, gpu_memory=f"{PERCENTS[0]}%", **options)
    assert (alone.graphs, alone.plans) == (opened.graphs[:1], opened.plans[:1])


@pytest.mark.slow
@pytest.mark.isa("avx2")
def test_sweep_shows_what_compile_would_plan(
    network: onnx.ModelProto,
    artifact: Path,
    options: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    onnx.save(network, tmp_path / "network.onnx")
    words = ["--target", TARGET, "--machine", str(options["machine"]), "--plan-seconds", "0.05"]
    words += ["--gpu-memory", "50%..100%", "--points", "2", "--json"]
    assert main(["sweep", str(tmp_path / "network.onnx"), *words]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    figures = ("gpu_memory_bytes", "peak_bytes", "time_us", "bound_us")
    assert [{name: point[name] for name in figures} for point in points] == [
        {
            "gpu_memory_bytes": plan.budget_bytes,
            "peak_bytes": plan.arena_bytes(Device.GPU),
            "time_us": plan.makespan_us,
            "bound_us": plan.time_bound_us,
        }
        for plan in open_artifact(artifact).plans
    ]
    assert main(["plan", str(artifact), "--gpu-memory", f"{points[0]['gpu_memory_bytes']}B"]) == 0
    assert ", 1 of 2, for the budgets" in capsys.readouterr().out


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("network", ["mlp", pytest.param("unet", marks=pytest.mark.slow)], indirect=True)
def test_budget_that_no_way_of_cutting_up_meets_is_refused_with_the_smallest(
    network: onnx.ModelProto, options: dict[str, Any]
) -> None:
    whole_bytes = hybridc.plan(network, pins={"*": "gpu"}, **options).smallest_budget_bytes
    with pytest.raises(hybridc.errors.PlanError) as refused:
        hybridc.plan(network, gpu_memory="1KiB", pins={"*": "gpu"}, **options)
    least_bytes = refused.value.smallest_budget_bytes
    assert refused.value.code == "HC203" and least_bytes is not None and least_bytes < whole_bytes
    planned = hybridc.plan(network, gpu_memory=f"{least_bytes}B", pins={"*": "gpu"}, **options)
    assert planned.smallest_budget_bytes == least_bytes == planned.plan.arena_bytes(Device.GPU)
