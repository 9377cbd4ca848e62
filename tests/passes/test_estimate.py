"""GPU times that the planner takes from the loops of scheduled functions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hybridc
from hybridc.ir import Device
from hybridc.machine import Efficiency, Machine, load_machine, machine_to_json
from hybridc.models.mlp import mlp
from hybridc.passes.planner.model.cost import TimeSource, kernel_us, time_source
from hybridc.results import Planned

GPU, CPU = Device.GPU, Device.CPU


def planned(machine: Machine, tmp_path: Path) -> Planned:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine_to_json(machine)))
    return hybridc.plan(mlp(), machine=str(path), plan_seconds=0.1, cache=False)


def with_gpu(machine: Machine, **changes: Any) -> Machine:
    return replace(machine, gpu=replace(machine.gpu, **changes))


@pytest.mark.parametrize("name", ["laptop-4gb", "a100"])
def test_gpu_times_come_from_the_loops_and_exceed_the_roofline(name: str, tmp_path: Path) -> None:
    machine = load_machine(name)
    made = planned(machine, tmp_path)
    for kernel in made.graphs[-1].kernels:
        assert time_source(kernel, made.machine, GPU) is TimeSource.LOOPS
        assert kernel_us(kernel, made.machine, GPU) >= 0.9 * kernel_us(kernel, machine, GPU)
        assert time_source(kernel, made.machine, CPU) is TimeSource.FAMILY


def test_profile_that_does_not_say_how_its_gpu_is_built_has_what_kernels_usually_reach(
    tmp_path: Path,
) -> None:
    machine = with_gpu(load_machine(), chip=None)
    made = planned(machine, tmp_path)
    for kernel in made.graphs[-1].kernels:
        assert time_source(kernel, made.machine, GPU) is TimeSource.FAMILY
        assert kernel_us(kernel, made.machine, GPU) > kernel_us(kernel, machine, GPU)


def test_calibrated_family_keeps_what_was_measured(tmp_path: Path) -> None:
    made = planned(with_gpu(load_machine(), efficiencies={"matmul": Efficiency(0.5, 0.5)}), tmp_path)
    sources = {kernel.family: time_source(kernel, made.machine, GPU) for kernel in made.graphs[-1].kernels}
    assert sources.pop("matmul") is TimeSource.FAMILY
    assert all(source is TimeSource.LOOPS for source in sources.values())
