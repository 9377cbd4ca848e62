"""Tuning from the options of a compilation to the tiles that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tvm_ffi import structural_equal

import hybridc
from hybridc.errors import DeviceError
from hybridc.ir import Device
from hybridc.models.builder import GraphBuilder
from hybridc.options import CompileOptions
from hybridc.passes.import_model import import_model
from hybridc.passes.pipeline import run_stages
from hybridc.passes.schedule import Tunable
from hybridc.progress import NullProgress
from hybridc.results import Compiled
from hybridc.schedules.rule import Scheduled
from hybridc.targets import native_isa, parse_target
from hybridc.tuning import tuner_of
from hybridc.tuning.measure import Measurer


def convolutions() -> onnx.ModelProto:
    """Two of one shape, which a rule with several tiles takes."""
    g = GraphBuilder("convolutions", 0)
    x = g.input("x", (1, 16, 12, 12))
    for _ in range(2):
        x = g.relu(g.conv(x, 16, 5, padding=2))
    return g.model(y=x)


def test_nothing_is_measured_or_read_unless_asked_for() -> None:
    assert tuner_of(CompileOptions(target=parse_target("avx2")), NullProgress()) is None


def test_instruction_set_that_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridc.tuning.tuner.missing_flags", lambda isa: ("amx_tile",))
    options = CompileOptions(target=parse_target("amx"), tune_seconds=1.0)
    with pytest.raises(DeviceError, match="amx_tile") as refusal:
        tuner_of(options, NullProgress())
    assert refusal.value.code == "HC401"
    assert (
        tuner_of(replace(options, tune_seconds=None, tune_record=Path("r.json")), NullProgress()) is not None
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many versions of each function were measured: the last one always turns out to be the fastest."""
    counts: list[int] = []

    def measure(self: Measurer, versions: Iterable[Scheduled], expired: Callable[[], bool]) -> list[float]:
        times = [1 / (1 + i) for i, _ in enumerate(versions)]
        counts.append(len(times))
        return times

    monkeypatch.setattr(Measurer, "__call__", measure)
    return counts


@pytest.mark.isa("avx2")
def test_tuned_model_computes_the_same_and_its_record_serves_again(
    tmp_path: Path, measured: list[int]
) -> None:
    record = tmp_path / "record.json"

    def compiled(name: str, **options: Any) -> Compiled:
        return hybridc.compile(convolutions(), tmp_path / name, target="avx2", **options)

    plain = compiled("plain")
    tuned = compiled("tuned", tune_seconds=60, tune_record=record)
    assert measured and min(measured) >= 2
    again = compiled("again", tune_record=record)
    assert len(measured) == len(tuned.tuned)
    assert tuned.tuned == again.tuned != plain.tuned == {}
    x = np.random.default_rng(0).standard_normal((1, 16, 12, 12)).astype(np.float32)
    outputs = [hybridc.load(c.path).run(None, {"x": x})[0] for c in (plain, tuned, again) if c.path]
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(outputs[1], outputs[2])


def test_chooser_hears_of_a_function_once_with_the_work_of_all_its_calls() -> None:
    heard: list[tuple[Tunable, ...]] = []

    def chooser(tunables: Sequence[Tunable]) -> Mapping[str, str]:
        heard.append(tuple(tunables))
        return {tunable.name: tunable.scheduled.choices[-1] for tunable in tunables}

    _, start = import_model(convolutions(), CompileOptions(target=parse_target("avx2")))
    done = run_stages(
        replace(start, job=replace(start.job, chooser=chooser)), NullProgress(), stop_after="schedule"
    )
    ((tunable,),) = heard
    assert tunable.flops >= 2 * (2 * 16 * 16 * 25 * 12 * 12)
    chosen = done.scheduled[tunable.name, Device.CPU].function
    assert structural_equal(chosen, tunable.version(tunable.scheduled.choices[-1]).function)
    assert not structural_equal(chosen, tunable.scheduled.function)


def test_measurer_times_two_versions_once_the_time_is_up(tunable: Any) -> None:
    version = tunable("f").scheduled
    measure = Measurer(native_isa(), 1)
    assert len(measure([version] * 3, lambda: True)) == 2
    assert all(ms > 0 for ms in measure([version] * 3, lambda: False))
