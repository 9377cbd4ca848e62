"""From pretended times to a profile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hybridc.calibrate import measure
from hybridc.calibrate.measure import calibrate, measure_processor
from hybridc.calibrate.samples import Subject, subjects
from hybridc.ir import Device
from hybridc.ir.graph import FAMILIES
from hybridc.machine import Link, load_machine, machine_from_json, machine_to_json
from hybridc.progress import NullProgress
from hybridc.schedules.rule import Scheduled
from hybridc.targets import parse_target
from tests.support.timers import PretendedTimer

TARGET = parse_target("cuda:sm_75+avx2")


def subject(family: str, rule: str, flops: int, bytes_moved: int, *devices: Device) -> Subject:
    return Subject(rule, family, flops, bytes_moved, {d: Scheduled(None, rule) for d in devices})


SUBJECTS = (
    subject("matmul", "m", 10**7, 10, *Device),
    subject("pooling", "p", 10, 10**6, *Device),
    subject("reduction", "r", 10, 10**6, Device.GPU),
)


def test_samples_stand_for_every_family_of_a_gpu_and_cpu_target() -> None:
    found = subjects(TARGET, 2)
    assert {s.family for s in found} == set(FAMILIES) - {"other"}
    assert all(set(s.scheduled) == set(Device) for s in found)
    assert all(s.bytes_moved > 0 for s in found)


def test_processor_gets_its_launch_and_the_efficiencies_of_its_own_kernels() -> None:
    timer = PretendedTimer(Device.CPU, {"m": 200.0, "p": 125.0})
    told: list[tuple[int, int]] = []
    made = measure_processor(timer, TARGET, SUBJECTS, "c", 1 << 30, lambda d, n: told.append((d, n)))
    assert (made.name, made.peak_gflops, made.bandwidth_gb_s, made.launch_us) == ("c", 100, 10, 3)
    assert set(made.efficiencies) == {"matmul", "pooling"}
    assert made.efficiencies["matmul"].compute == pytest.approx(0.5, rel=0.03)
    assert made.efficiencies["pooling"].memory == pytest.approx(0.8, rel=0.03)
    assert told == [(0, 2), (1, 2), (2, 2)]


def test_peak_is_the_better_of_two_measurements() -> None:
    timer = PretendedTimer(Device.CPU, peaks_gflops=[40.0, 80.0])
    assert measure_processor(timer, TARGET, SUBJECTS[:1], "c", 1 << 30).peak_gflops == 80


@contextmanager
def _unopened(size_bytes: int, *, to_host: bool = False) -> Iterator[None]:
    yield


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The computer that `calibrate` finds: `gpu` may be a timer."""
    computer: dict[str, Any] = {"gpu": None}
    monkeypatch.setattr(measure, "CpuTimer", lambda target, threads: PretendedTimer(Device.CPU))
    monkeypatch.setattr(measure, "gpu_timer", lambda target: computer["gpu"])
    monkeypatch.setattr(measure, "gpu_identity", lambda: ("some GPU", 1 << 33))
    monkeypatch.setattr(measure, "measure_link", lambda: Link(11.11111, 12, 8.88888, 0.9))
    monkeypatch.setattr(measure, "opened", _unopened)
    monkeypatch.setattr(measure, "shared_gb_s", lambda kernel, copies: copies.moved_bytes / (1 << 23))
    monkeypatch.setattr(measure, "subjects", lambda target, threads: SUBJECTS)
    return computer


def test_without_a_gpu_its_part_comes_from_a_profile_and_the_source_says_so(pretended: Any) -> None:
    for given, expected in ((None, "laptop-4gb"), (load_machine("h100"), "h100")):
        machine = calibrate("mine", TARGET, 2, "cpu", 1 << 34, given, NullProgress())
        other = load_machine(expected)
        assert (machine.gpu, machine.link) == (other.gpu, other.link)
        assert f"not measured, but taken from the profile {expected}: {other.source}" in machine.source
        assert (machine.name, machine.cpu.name, machine.cpu.memory_bytes) == ("mine", "cpu", 1 << 34)
        assert machine.cpu.shared_gb_s == 16  # beside copies of a thread, which read and write


def test_with_a_gpu_everything_is_measured_and_makes_a_valid_profile(pretended: Any) -> None:
    pretended["gpu"] = PretendedTimer(Device.GPU)
    machine = calibrate("mine", TARGET, 2, "cpu", 1 << 34, None, NullProgress())
    assert (machine.gpu.name, machine.gpu.memory_bytes) == ("some GPU", 1 << 33)
    assert set(machine.gpu.efficiencies) == {"matmul", "pooling", "reduction"}
    assert machine.link == Link(11.11, 12, 8.889, 0.9)
    assert machine.gpu.shared_gb_s == machine.cpu.shared_gb_s == 8
    assert "not measured" not in machine.source
    assert machine_from_json(machine_to_json(machine)) == machine


@pytest.mark.parametrize(("target", "given"), [("avx2", None), ("cuda+avx2", "h100")])
def test_gpu_is_left_alone_where_the_target_has_none_or_a_profile_is_given(
    pretended: Any, target: str, given: str | None
) -> None:
    pretended["gpu"] = PretendedTimer(Device.GPU)
    other = load_machine(given) if given else None
    calibrate("mine", parse_target(target), 2, "cpu", 1 << 34, other, NullProgress())
    assert pretended["gpu"].timed == []
