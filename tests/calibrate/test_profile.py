"""Measured times of a model's functions, and that the planner takes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx
import pytest

from hybridc.caches import FileCache
from hybridc.calibrate import profile
from hybridc.calibrate.profile import profiler_of, times_us
from hybridc.compiler import plan_model
from hybridc.ir import Device
from hybridc.models import build
from hybridc.models.builder import GraphBuilder
from hybridc.options import CompileOptions, parse_budgets
from hybridc.passes.import_model import import_model
from hybridc.passes.phases import ImportedNetwork, PlannedNetwork, TiledNetwork
from hybridc.passes.pipeline import run_stages
from hybridc.progress import NullProgress
from hybridc.schedules.rule import Scheduled
from hybridc.targets import parse_target
from tests.support.timers import PretendedTimer

OPTIONS = CompileOptions(target=parse_target("cuda:sm_75+avx2"), profile_kernels=True)


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> ImportedNetwork:
    """Whose functions are scheduled once for all tests: what is measured of them changes no schedule."""
    options = replace(OPTIONS, gpu_memory=parse_budgets("50%"), plan_seconds=1.0)
    cache = FileCache(tmp_path_factory.mktemp("cache") / "compiled")
    return import_model(build("unet", size=32, width=4, levels=1), options, cache)[1]


def two_poolings() -> onnx.ModelProto:
    """Of one shape, so that they share a function."""
    g = GraphBuilder("poolings", 0)
    x = g.input("x", (1, 8, 16, 16))
    y = g.pool("MaxPool", x, 3, stride=1, padding=1)
    return g.model(y=g.pool("MaxPool", y, 3, stride=1, padding=1))


def test_nothing_is_measured_unless_asked_for() -> None:
    assert profiler_of(replace(OPTIONS, profile_kernels=False), NullProgress()) is None


def test_each_function_is_timed_once_on_every_device_that_has_a_timer() -> None:
    scheduled = {(name, device): Scheduled(None, name) for name in "ab" for device in Device}
    timer = PretendedTimer(Device.CPU, {"a": 1.0, "b": 2.0})
    assert times_us(scheduled, [timer], NullProgress()) == {("a", Device.CPU): 4.0, ("b", Device.CPU): 5.0}
    assert len(timer.timed) == 2


def test_function_that_the_memory_does_not_hold_is_left_to_prediction() -> None:
    scheduled = {(name, Device.GPU): Scheduled(None, name) for name in "ab"}
    timer = PretendedTimer(Device.GPU, too_large=("a",))
    assert times_us(scheduled, [timer], NullProgress()) == {("b", Device.GPU): 3.0}


@pytest.mark.parametrize(("gpu_us", "device"), [(1.0, Device.GPU), (1e6, Device.CPU)])
def test_planner_takes_measured_times(gpu_us: float, device: Device) -> None:
    def profiler(scheduled: Any) -> dict[tuple[str, Device], float]:
        return {key: gpu_us if key[1] is Device.GPU else 1000.0 for key in scheduled}

    _, start = import_model(two_poolings(), OPTIONS)
    done = run_stages(
        replace(start, job=replace(start.job, profiler=profiler)), NullProgress(), stop_after="plan"
    )
    (plan,) = done.plans
    assert set(plan.device_of().values()) == {device}


@pytest.mark.slow
def test_measured_times_decide_whether_a_network_is_tiled(unet: ImportedNetwork) -> None:
    asked: list[set[str]] = []

    def profiler(scheduled: Any) -> dict[tuple[str, Device], float]:
        """The functions of the whole network, which are asked for first, are absurdly slow."""
        asked.append({name for name, _ in scheduled})
        return dict.fromkeys(scheduled, 1e9 if len(asked) == 1 else 1.0)

    predicted: PlannedNetwork = run_stages(unet, NullProgress(), stop_after="plan")
    start = replace(unet, job=replace(unet.job, profiler=profiler))
    measured: PlannedNetwork = run_stages(start, NullProgress(), stop_after="plan")
    assert asked[0] == {kernel.function for kernel in predicted.whole.graph.kernels}
    assert predicted.graphs == (predicted.whole.graph,)
    assert measured.graphs != (predicted.whole.graph,)


@pytest.mark.slow
def test_functions_that_tilings_share_are_measured_once(unet: ImportedNetwork) -> None:
    asked: list[str] = []

    def profiler(scheduled: Any) -> dict[tuple[str, Device], float]:
        asked.extend({name for name, _ in scheduled})
        return dict.fromkeys(scheduled, 10.0)

    start = replace(unet, job=replace(unet.job, profiler=profiler))
    tiled: TiledNetwork = run_stages(start, NullProgress(), stop_after="tile")
    planned = {kernel.function for tiling in tiled.tilings for kernel in tiling.graph.kernels}
    assert len(asked) == len(set(asked))
    assert planned <= set(asked)


def test_plan_tells_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "CpuTimer", lambda target, threads: PretendedTimer(Device.CPU))
    monkeypatch.setattr(profile, "gpu_timer", lambda target: None)
    planned = plan_model(two_poolings(), OPTIONS)
    (graph,) = planned.graphs
    (name,) = {kernel.function for kernel in graph.kernels}
    assert planned.machine.measured_us == {(name, Device.CPU): 3.0}


@pytest.mark.isa("avx2")
def test_real_functions_of_the_cpu_are_timed() -> None:
    planned = plan_model(two_poolings(), replace(OPTIONS, target=parse_target("avx2")))
    assert all(us > 0 for us in planned.machine.measured_us.values())
    assert len(planned.machine.measured_us) == 1
