"""Machine profiles: those that come along, and what is wrong with others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from hybridc.errors import UsageError
from hybridc.ir import Device
from hybridc.ir.graph import FAMILIES
from hybridc.machine import Efficiency, load_machine, machine_from_json, machine_names, machine_to_json
from hybridc.machines.typical import COPY_SHARE, TYPICAL_CPU, TYPICAL_GPU, with_typical_shares

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
CPU_RECORD, GPU_RECORD = RESULTS / "cpu_avx512.json", RESULTS / "gpu_model_suite.json"


@pytest.mark.parametrize("name", machine_names())
def test_profile_loads_and_survives_json(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert machine.source
    assert machine_from_json(json.loads(json.dumps(machine_to_json(machine)))) == machine


def test_default_is_a_small_laptop() -> None:
    assert load_machine().gpu.memory_bytes == 4 << 30


def test_profile_is_read_from_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(machine_to_json(load_machine("h100")) | {"name": "mine"}))
    assert load_machine(path).name == "mine"


def test_unknown_name_is_refused_with_the_closest_one() -> None:
    with pytest.raises(UsageError) as error:
        load_machine("laptop-4g")
    assert error.value.code == "HC540"
    assert "did you mean 'laptop-4gb'?" in error.value.remedy


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("peak_gflops", 0, "not positive"),
        ("bandwidth_gb_s", -1, "not positive"),
        ("launch_us", float("nan"), "not a number"),
        ("peak_gflops", "fast", "not a number"),
        ("peak_gflops", True, "not a number"),
        ("peak_gflops", 10**400, "not a number"),
        ("memory_bytes", 1.5, "whole number"),
        ("name", 3, "not a string"),
        ("bandwith", 3, "unknown key"),
    ],
)
def test_wrong_value_is_refused_by_name(key: str, value: Any, what: str) -> None:
    data = machine_to_json(load_machine())
    data["gpu"][key] = value
    with pytest.raises(UsageError, match=what) as error:
        machine_from_json(data, "mine.json")
    assert error.value.code == "HC541"
    assert "mine.json: gpu" in error.value.where and error.value.remedy


@pytest.mark.parametrize("data", [None, [], {}, {"name": "x"}, {"name": "x", "gpu": 1, "cpu": 2, "link": 3}])
def test_something_else_than_a_profile_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match=r"missing|expected"):
        machine_from_json(data, "mine.json")


@pytest.mark.parametrize("content", [None, "{", "[" * 10_000])
def test_unreadable_file_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError) as error:
        load_machine(path)
    assert error.value.code == "HC541"


def test_efficiencies_survive_json_and_count_as_full_where_they_are_left_out() -> None:
    machine = load_machine()
    shares = {family: Efficiency(0.5, 0.25) for family in FAMILIES[:-1]}
    measured = replace(machine, gpu=replace(machine.gpu, efficiencies=shares))
    assert machine_from_json(json.loads(json.dumps(machine_to_json(measured)))) == measured
    assert measured.gpu.efficiency(FAMILIES[0]) == Efficiency(0.5, 0.25)
    assert measured.gpu.efficiency(FAMILIES[-1]) == Efficiency(1.0, 1.0)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("multiprocessors", 2.5, "whole number"),
        ("clock_ghz", 0, "not positive"),
        ("architecture", 86, "not a string"),
        ("tensor_gflops", {"float8": 1}, "unknown key"),
        ("tensor_gflops", {"int8": -1}, "not positive"),
    ],
)
def test_wrong_value_of_a_chip_is_refused_by_name(key: str, value: Any, what: str) -> None:
    data = machine_to_json(load_machine("rtx-3090"))
    data["gpu"]["chip"][key] = value
    with pytest.raises(UsageError, match=what) as error:
        machine_from_json(data, "mine.json")
    assert error.value.code == "HC541" and "gpu.chip" in error.value.where


@pytest.mark.parametrize("name", sorted(set(machine_names()) - {"k40"}))
def test_peaks_are_those_of_the_chip(name: str) -> None:
    gpu = load_machine(name).gpu
    assert gpu.chip is not None
    lanes = 128 if gpu.chip.architecture in ("sm_86", "sm_89", "sm_90") else 64
    of_chip = 2 * lanes * gpu.chip.multiprocessors * gpu.chip.clock_ghz
    assert gpu.peak_gflops == pytest.approx(of_chip, rel=0.01)


def test_profile_of_peaks_and_speeds_alone_is_complete() -> None:
    data = machine_to_json(load_machine())
    for processor in (data["gpu"], data["cpu"]):
        del processor["efficiencies"]
    del data["link"]["both_directions"]
    assert machine_from_json(data) == load_machine()


def _recorded_shares(rows: Any, shares: tuple[str, str], is_of_memory: Any) -> dict[str, tuple[float, float]]:
    """Medians by family of what kernels reach of peak and bandwidth; "" has those of all kernels."""
    families = {"conv2d_blocked": "conv2d", "attention": "matmul"}
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        family, memory = families.get(row["rule"], row["rule"]), is_of_memory(row)
        for name in (family, ""):
            found.setdefault(name, ([], []))[memory].append(row[shares[memory]])
    whole = tuple(map(median, found[""]))
    return {name: (median(of[0] or [whole[0]]), median(of[1] or [whole[1]])) for name, of in found.items()}


def _is_as_recorded(typical: Any, recorded: dict[str, tuple[float, float]], within: float) -> bool:
    named = ((typical[family], recorded.get(family, recorded[""])) for family in FAMILIES)
    return all((one.compute, one.memory) == pytest.approx(shares, abs=within) for one, shares in named)


def test_typical_cpu_reaches_the_medians_of_the_recorded_kernels() -> None:
    rows = [row for row in json.loads(CPU_RECORD.read_text())["rows"] if row["table"] == "kernels"]
    recorded = _recorded_shares(
        rows, ("percent_of_peak", "percent_of_copy"), lambda row: row["bound"] != "compute"
    )
    # what a copy reaches of the data sheet's bandwidth, at most
    shares = {f: (c / 100, COPY_SHARE * min(1.0, m / 100)) for f, (c, m) in recorded.items()}
    assert _is_as_recorded(TYPICAL_CPU, shares, 1e-3)
    assert all(one.memory <= COPY_SHARE for one in TYPICAL_CPU.values())


def test_typical_gpu_reaches_what_our_kernels_are_estimated_to() -> None:
    rows = [
        row
        for row in json.loads(GPU_RECORD.read_text())["rows"]
        if "kernel" in row and "1650" in row["gpu"]
        if row["bound_by"] == "memory" or row["rule"] in ("conv2d", "winograd", "matmul", "attention")
    ]
    recorded = _recorded_shares(
        rows, ("share_of_peak", "share_of_bandwidth"), lambda row: row["bound_by"] == "memory"
    )
    # the record is made again as kernels get better: typical shares are round
    assert _is_as_recorded(TYPICAL_GPU, recorded, 0.1)


@pytest.mark.parametrize("name", machine_names())
def test_no_profile_takes_kernels_to_reach_the_data_sheet(name: str) -> None:
    machine = with_typical_shares(load_machine(name))
    for processor in (machine.gpu, machine.cpu):
        assert set(processor.efficiencies) == set(FAMILIES)
        assert all(one.memory < 1 for one in processor.efficiencies.values())
        assert processor.together_gb_s < processor.bandwidth_gb_s
        assert all(one.compute < 1 or family == "winograd" for family, one in processor.efficiencies.items())


def test_calibrated_processor_keeps_what_was_measured_and_its_other_families_take_the_median() -> None:
    machine = load_machine()
    measured = {"conv2d": Efficiency(0.5, 0.6), "matmul": Efficiency(0.7, 0.9)}
    calibrated = replace(machine, cpu=replace(machine.cpu, efficiencies=measured, shared_gb_s=30.0))
    cpu = with_typical_shares(calibrated).cpu
    assert {family: cpu.efficiency(family) for family in measured} == measured
    median_of = cpu.efficiency("depthwise")
    assert (median_of.compute, median_of.memory) == pytest.approx((0.6, 0.75))
    assert (cpu.bandwidth_gb_s, cpu.shared_gb_s) == (machine.cpu.bandwidth_gb_s, 30.0)


def test_times_of_a_graph_are_no_part_of_a_profile() -> None:
    times = {("f", Device.CPU): 1.0}
    machine = replace(load_machine(), measured_us=times, estimated_us=times)
    assert machine_to_json(machine) == machine_to_json(load_machine())


@pytest.mark.parametrize(
    ("efficiencies", "where", "what"),
    [
        ([], "gpu.efficiencies", "expected an object"),
        ({"matmull": {"compute": 1, "memory": 1}}, "gpu.efficiencies", "unknown key"),
        ({"matmul": {"compute": 1}}, "gpu.efficiencies.matmul", "missing"),
        ({"matmul": {"compute": 0, "memory": 1}}, "gpu.efficiencies.matmul.compute", "not positive"),
    ],
)
def test_wrong_efficiency_is_refused_by_name(efficiencies: Any, where: str, what: str) -> None:
    data = machine_to_json(load_machine())
    data["gpu"]["efficiencies"] = efficiencies
    with pytest.raises(UsageError, match=what) as error:
        machine_from_json(data, "mine.json")
    assert error.value.where == f"mine.json: {where}"


def test_share_of_the_bandwidth_in_both_directions_is_at_most_one() -> None:
    data = machine_to_json(load_machine())
    data["link"]["both_directions"] = 1.5
    with pytest.raises(UsageError, match="not a fraction"):
        machine_from_json(data)
