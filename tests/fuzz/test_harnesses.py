"""Some random inputs of every kind in each run of the suite, many of them with `make test-full`."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hybridc.runtime import Session
from tests.fuzz import artifacts, dying, feeds, models, training
from tests.fuzz.driver import Harness, fuzz, main

pytest.importorskip("onnxruntime")

FEW_OPERATORS = ("gather nd", "div int32")
"""Each takes a second to compile."""
FEW_FEEDS = Harness("feeds", partial(feeds.check, names=FEW_OPERATORS, gpu_share=0.0), feeds.HARNESS.seconds)


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(
    ("harness", "inputs"),
    [
        pytest.param(models.HARNESS, 4, id="models"),
        pytest.param(FEW_FEEDS, 20, id="feeds"),
        pytest.param(artifacts.HARNESS, 5, id="artifacts"),
        pytest.param(training.HARNESS, 5, id="training"),
    ],
)
def test_few_inputs_are_refused_by_name_or_right(harness: Harness, inputs: int) -> None:
    report = fuzz(harness, 0, inputs=inputs)
    assert report.outcomes.total() == inputs
    assert not report.finds


@pytest.mark.slow
@pytest.mark.isa("avx2")
@pytest.mark.parametrize(
    ("harness", "inputs"),
    [
        pytest.param(models.HARNESS, 1500, id="models"),
        pytest.param(feeds.HARNESS, 4000, id="feeds"),
        pytest.param(artifacts.HARNESS, 1000, id="artifacts"),
        pytest.param(training.HARNESS, 1000, id="training"),
    ],
)
def test_many_inputs_are_refused_by_name_or_right(harness: Harness, inputs: int) -> None:
    assert not fuzz(harness, 1, inputs=inputs, workers=2).finds


def test_at_most_so_many_sessions_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def opened(name: str, device: str) -> feeds.Opened:
        session = SimpleNamespace(close=lambda: closed.append(name))
        return feeds.Opened(cast(Session, session), None, None, feeds.KINDS)

    monkeypatch.setattr(feeds, "_open", opened)
    monkeypatch.setattr(feeds, "_opened", lambda kept=OrderedDict(): kept)
    monkeypatch.setattr(feeds, "SESSIONS", 2)
    for name in "abacba":
        feeds._on_device(name, "cpu")
    assert "".join(closed) == "bac"


def test_driver_counts_what_dies_and_what_raises(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert main(dying.HARNESS, ["--inputs", "9", "--workers", "1", "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert report["inputs"] == 9 == report["right"] + report["crashes"] + report["internal"]
    assert min(report["right"], report["crashes"], report["internal"]) > 0
    assert report["hangs"] == report["wrong"] == 0
    assert len(report["finds"]) == report["crashes"] + report["internal"]
