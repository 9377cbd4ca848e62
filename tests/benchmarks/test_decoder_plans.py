"""The benchmark of decoders that are larger than their GPU: what it draws, and how its rows are judged."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def decoder_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import decoder_plans as imported

    yield imported
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("decoder_plans", "common", "pages"):
            del sys.modules[name]


def row(tokens: float, bound: float, seconds: float) -> dict[str, Any]:
    others = {"layer split": 10.0, "streaming": 2.0, "CPU alone": None}
    return {
        "tokens_per_s": tokens,
        "bound_tokens_per_s": bound,
        "plan_seconds": seconds,
        "others": others,
        "machine": "laptop-4gb",
        "context": 2048,
        "kv_cache": "int8",
        "budget_gib": 3.0,
        "needed_gib": 5.0,
        "is_drawn": True,
    }


def test_points_are_those_of_the_seed(decoder_plans: Any) -> None:
    points = decoder_plans.drawn(20, 7)
    assert points == decoder_plans.drawn(20, 7) != decoder_plans.drawn(20, 8)
    assert all(point.is_drawn and point.context in decoder_plans.CONTEXTS for point in points)
    memory = {
        p.machine: decoder_plans.load_machine(p.machine).gpu.memory_bytes / decoder_plans.GIB for p in points
    }
    assert all(0.39 <= point.gib / memory[point.machine] <= 0.96 for point in points)
    assert len(memory) > 2 and max(memory.values()) <= 12


@pytest.mark.parametrize(
    ("tokens", "bound", "seconds", "wanted"),
    [(16.0, 17.0, 59.0, True), (15.9, 16.0, 1.0, False), (16.0, 18.0, 1.0, False), (16.0, 16.0, 61.0, False)],
)
def test_rows_are_held_against_what_is_wanted(
    decoder_plans: Any, tokens: float, bound: float, seconds: float, wanted: bool
) -> None:
    made = row(tokens, bound, seconds)
    assert decoder_plans.is_as_wanted(made) is wanted
    assert f"{tokens / 10:.2f} times the best" in decoder_plans.text(made)


def test_the_table_tells_a_way_that_does_not_fit(decoder_plans: Any) -> None:
    from pages.decoder_plans import line_of

    line = line_of(row(16.0, 17.0, 20.0), ["layer split", "streaming", "CPU alone"])
    assert line.startswith(
        "| laptop-4gb, drawn | 2,048 | int8 | 3.00, 5.00 | 16.0 | 10.0 | 2.0 | - | 1.60 | 6% |"
    )
