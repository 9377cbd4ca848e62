"""Networks that torch exports give what onnxruntime gives: all of them by `python -m tests.exports`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")

from tests.exports.__main__ import verdicts
from tests.exports.export import VARIANTS
from tests.exports.judge import Outcome, Verdict, judge

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "exports.json"
SMALL = ("graph/dynamo/fixed", "lstm/script/half")
"""Of each exporter one that takes few seconds."""
GPU = "cuda:sm_80+avx2"


def recorded(target: str) -> dict[str, str]:
    """Outcomes of the whole table for a target, by network."""
    rows = json.loads(RECORD.read_text())["rows"]
    return {row["name"]: row["outcome"] for row in rows if row["target"] == target}


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("name", SMALL)
def test_small_networks_agree(name: str) -> None:
    verdict = judge(VARIANTS[name], "avx2")
    assert verdict.outcome is Outcome.AGREES, verdict


@pytest.mark.slow
@pytest.mark.isa("avx2")
@pytest.mark.parametrize("target", ["avx2", GPU])
def test_the_whole_table_gives_what_is_recorded(target: str) -> None:
    expected = recorded(target)
    found = list(verdicts(list(expected), target, limit_seconds=600))
    assert {each.name: str(each.outcome) for each in found} == expected, [
        each for each in found if str(each.outcome) != expected[each.name]
    ]
    taken = [each for each in found if each.outcome is not Outcome.NOT_EXPORTED]
    assert share(taken) >= 0.95


def share(found: list[Verdict]) -> float:
    """Of networks that are compiled and agree."""
    return sum(each.outcome is Outcome.AGREES for each in found) / len(found)
