"""`hybridc machine calibrate` with pretended measurements, and times that a plan is made with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridc.errors import DeviceError
from hybridc.machine import Efficiency, Machine, load_machine, machine_from_json


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of the measurement: the laptop's profile with an efficiency is what comes of it."""
    from hybridc.calibrate import measure

    found: list[tuple[Any, ...]] = []

    def calibrate(name: str, *rest: Any) -> Machine:
        found.append((name, *rest))
        machine = load_machine()
        cpu = replace(machine.cpu, efficiencies={"matmul": Efficiency(0.8, 0.5)})
        return replace(machine, name=name, cpu=cpu)

    monkeypatch.setattr(measure, "calibrate", calibrate)
    return found


def test_profile_is_written_and_can_be_used(cli: Any, calls: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    out = cli("machine", "calibrate", "-o", path, "--target", "cuda+avx2", "--threads", "3").out
    assert "CPU   matmul: 80% of the peak, 50% of the bandwidth" in out
    assert f"--machine {path}" in out
    machine = load_machine(path)
    assert machine.name == "mine" and machine.cpu.efficiency("matmul") == Efficiency(0.8, 0.5)
    ((name, target, threads, cpu, memory_bytes, gpu_from, _),) = calls
    assert (name, str(target), threads, gpu_from) == ("mine", "cuda+avx2", 3, None)
    assert cpu.endswith("(avx2, 3 threads)") and memory_bytes > 0
    assert list(tmp_path.iterdir()) == [path]


def test_profile_is_printed_as_json(cli: Any, calls: Any) -> None:
    data = cli("machine", "calibrate", "--target", "avx2", "--gpu-from", "h100", "--json").json()
    assert machine_from_json(data).name == "this-computer"
    assert calls[0][5] == load_machine("h100")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-o", "mine"], "must end in .json"),
        (["--gpu-from", "h10"], "did you mean 'h100'?"),
        (["--target", "avx3"], "unknown instruction set"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_measured(
    cli: Any, calls: Any, words: list[str], text: str
) -> None:
    outcome = cli("machine", "calibrate", *words)
    assert outcome.code == 2 and text in outcome.err and calls == []


def test_network_is_not_measured_by_one_rank(cli: Any, calls: Any) -> None:
    pytest.importorskip("mpi4py")
    outcome = cli("machine", "calibrate", "--ranks", "mpi")
    assert outcome.code == 2 and "less than two ranks" in outcome.err and calls == []


def test_nothing_is_written_where_measuring_fails(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hybridc.calibrate import measure

    def calibrate(*_: Any) -> Machine:
        raise DeviceError("HC409", "an emulated GPU cannot be measured")

    monkeypatch.setattr(measure, "calibrate", calibrate)
    outcome = cli("machine", "calibrate", "-o", tmp_path / "mine.json")
    assert outcome.code == 5 and "HC409" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_measured_times_are_asked_for_and_told(cli: Any, fakes: Any, model: Path, tmp_path: Path) -> None:
    place = ("compile", model, "-o", tmp_path / "o.hyb", "--profile-kernels")
    assert "planned with 1 measured time" in cli(*place).out
    expected = [{"function": "f", "device": "cpu", "us": 2.5}]
    assert cli("plan", model, "--profile-kernels", "--json").json()["measured_us"] == expected
    assert "with 1 measured time" in cli("plan", model, "--profile-kernels").out
    assert cli("plan", model, "--json").json()["measured_us"] == []
    assert [options.profile_kernels for options in fakes.options] == [True, True, True, False]


def test_an_artifact_has_no_kernels_to_profile(cli: Any, artifact: Path) -> None:
    outcome = cli("plan", artifact, "--profile-kernels")
    assert outcome.code == 2 and "HC516" in outcome.err
