"""What is measured, in which order and for how long, and what is made of it. Clock and times are faked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridc.passes.schedule import Tunable
from hybridc.tuning.record import read_record
from hybridc.tuning.search import Conditions, key, recorded_choices, search, this_processor

HERE = Conditions("avx2", 2, "some processor", "0.1.0")
MakeTunable = Callable[..., Tunable]


class Bench:
    """Every version takes the milliseconds of its label, and a second of the clock to measure."""

    def __init__(self, ms: Mapping[str, float]) -> None:
        self.ms = ms
        self.now = 0.0
        self.measured: list[tuple[str, str]] = []

    def clock(self) -> float:
        return self.now

    def measure(self, versions: Iterable[Any], expired: Callable[[], bool]) -> list[float]:
        times = []
        for name, label in versions:
            self.measured.append((name, label))
            self.now += 1
            times.append(self.ms[label])
            if len(times) >= 2 and expired():
                break
        return times


@pytest.fixture(autouse=True)
def versions_are_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tunable, "version", lambda self, label: (self.name, label))


def run(bench: Bench, tunables: list[Tunable], path: Path, seconds: float) -> None:
    search(tunables, path, HERE, seconds, bench.measure, clock=bench.clock)


def test_faster_tiles_are_chosen_and_slower_ones_are_not(tmp_path: Path, tunable: MakeTunable) -> None:
    path = tmp_path / "record.json"
    tunables = [tunable("f", labels=("a", "b", "c")), tunable("g", size=9, labels=("b", "a"))]
    run(Bench({"a": 1.0, "b": 0.5, "c": 0.7}), tunables, path, 100)
    assert recorded_choices(tunables, path, HERE) == {"f": "b"}


def test_largest_share_comes_first_and_the_time_is_kept(tmp_path: Path, tunable: MakeTunable) -> None:
    sizes = {"small": 1, "large": 100, "middle": 10}
    tunables = [tunable(name, flops=flops, size=flops) for name, flops in sizes.items()]
    bench = Bench({"a": 1.0, "b": 0.5, "c": 0.7})
    run(bench, tunables, tmp_path / "record.json", 4)
    assert bench.measured == [("large", label) for label in "abc"] + [("middle", "a"), ("middle", "b")]


def test_next_search_goes_on_where_the_last_one_ended(tmp_path: Path, tunable: MakeTunable) -> None:
    path = tmp_path / "record.json"
    tunables = [tunable("f", flops=2), tunable("g", size=9)]
    run(Bench({"a": 1.0, "b": 0.8, "c": 0.7}), tunables, path, 2)
    slow_day = Bench({"a": 3.0, "b": 2.4, "c": 2.1})
    run(slow_day, tunables, path, 100)
    assert slow_day.measured == [("f", "a"), ("f", "c"), ("g", "a"), ("g", "b"), ("g", "c")]
    assert recorded_choices(tunables, path, HERE) == {"f": "c", "g": "c"}
    nothing_left = Bench({})
    run(nothing_left, tunables, path, 100)
    assert nothing_left.measured == []


def test_interrupted_search_keeps_what_was_measured(tmp_path: Path, tunable: MakeTunable) -> None:
    path = tmp_path / "record.json"
    tunables = [tunable("f", flops=2), tunable("g", size=9)]
    bench = Bench({"a": 1.0, "b": 0.8, "c": 0.7})

    def measure(versions: Iterable[Any], expired: Callable[[], bool]) -> list[float]:
        if bench.measured:
            raise KeyboardInterrupt
        return bench.measure(versions, expired)

    with pytest.raises(KeyboardInterrupt):
        search(tunables, path, HERE, 100, measure, clock=bench.clock)
    assert recorded_choices(tunables, path, HERE) == {"f": "c"}


@pytest.mark.parametrize(
    "other", [{"isa": "avx512"}, {"threads": 1}, {"processor": "another"}, {"version": "0.2.0"}]
)
def test_measurements_count_under_the_same_conditions_only(
    tmp_path: Path, tunable: MakeTunable, other: dict[str, Any]
) -> None:
    path = tmp_path / "record.json"
    run(Bench({"a": 1.0, "b": 0.5, "c": 0.7}), [tunable("f")], path, 100)
    assert recorded_choices([tunable("same function")], path, HERE) == {"same function": "b"}
    assert recorded_choices([tunable("f")], path, replace(HERE, **other)) == {}


def test_key_tells_functions_rules_and_requests_apart(tunable: MakeTunable) -> None:
    f = tunable("f")
    others = [
        tunable("f", size=9),
        replace(f, scheduled=replace(f.scheduled, rule="another")),
        replace(f, request=replace(f.request, constants=frozenset({0}))),
        replace(f, request=replace(f.request, winograd=False)),
    ]
    assert len({key(t, HERE) for t in (f, *others)}) == 5
    assert key(f, HERE) == key(tunable("another name"), HERE)


def test_tile_of_an_older_version_is_not_chosen(tmp_path: Path, tunable: MakeTunable) -> None:
    path = tmp_path / "record.json"
    run(Bench({"a": 1.0, "b": 0.5}), [tunable("f", labels=("a", "b"))], path, 100)
    assert recorded_choices([tunable("f", labels=("b", "a"))], path, HERE) == {}
    assert read_record(path)


def test_progress_counts_functions(tmp_path: Path, tunable: MakeTunable) -> None:
    told: list[tuple[int, int]] = []
    bench = Bench({"a": 1.0, "b": 0.5, "c": 0.7})
    tunables = [tunable("f"), tunable("g", size=9)]
    search(
        tunables,
        tmp_path / "record.json",
        HERE,
        100,
        bench.measure,
        progress=lambda done, total: told.append((done, total)),
        clock=bench.clock,
    )
    assert told == [(0, 2), (1, 2), (2, 2)]


def test_processor_is_known_by_more_than_its_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n")
    assert this_processor(cpuinfo) == "AMD EPYC, 25, 17"
    cpuinfo.write_text("")
    assert this_processor(cpuinfo) == "unknown, unknown, unknown"
