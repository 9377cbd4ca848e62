"""Outcomes of tests: counted by operator, and held against the list of those that are to pass."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "passing"


class Outcome(StrEnum):
    """What became of a test."""

    PASS = "pass"
    REFUSED = "refused"
    """By an error that blames the model: it names what is not supported."""
    WRONG = "wrong"
    INTERNAL = "internal"
    """An exception that is hybridc's fault, or that nobody foresaw."""
    CRASH = "crash"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One test's outcome."""

    test: str
    outcome: Outcome
    reason: str = ""
    operator: str = ""
    """That the test is about; empty if its model has several."""


def file_stem(target: str) -> str:
    """A target as part of a file's name: `cuda_sm_80_avx2`."""
    return re.sub(r"\W", "_", target)


def expected(target: str) -> set[str]:
    """Names of the tests that pass for a target."""
    path = _list_of(target)
    return set(path.read_text().split()) if path.exists() else set()


def write_expected(target: str, verdicts: Iterable[Verdict]) -> None:
    """Make what passes now what is to pass."""
    names = sorted(each.test for each in verdicts if each.outcome is Outcome.PASS)
    FOLDER.mkdir(exist_ok=True)
    _list_of(target).write_text("".join(f"{name}\n" for name in names))


def surprises(verdicts: Iterable[Verdict], expected: Collection[str]) -> list[str]:
    """A line for each test that passes no more, that passes unexpectedly, or that shows a fault."""
    lines = []
    for each in verdicts:
        passes = each.outcome is Outcome.PASS
        if passes and each.test not in expected:
            lines.append(f"{each.test}: passes unexpectedly")
        elif not passes and (each.test in expected or each.outcome is not Outcome.REFUSED):
            lines.append(f"{each.test}: {each.outcome}: {each.reason}")
    return lines


def by_operator(verdicts: Sequence[Verdict]) -> dict[str, Counter[Outcome]]:
    """Counts of outcomes. A test of an operator's function body counts for the operator."""
    operators = {each.test: each.operator for each in verdicts}
    counts: dict[str, Counter[Outcome]] = {}
    for each in verdicts:
        operator = each.operator or operators.get(each.test.split("_expanded")[0]) or "(several)"
        counts.setdefault(operator, Counter())[each.outcome] += 1
    return dict(sorted(counts.items()))


def reasons(verdicts: Iterable[Verdict]) -> Counter[str]:
    """How often tests are refused for the same reason: names and numbers in it do not count."""
    texts = (each.reason for each in verdicts if each.outcome is not Outcome.PASS)
    return Counter(re.sub(r"'[^']*'", "'_'", re.sub(r"(?<!HC)\b\d+\b", "N", text))[:110] for text in texts)


def to_json(target: str, date: str, onnx_version: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """A record for the documents."""
    return {
        "benchmark": f"onnx_suite_{target}",
        "date": date,
        "onnx": onnx_version,
        "total": _plain(Counter(each.outcome for each in verdicts)),
        "rows": [{"operator": name} | _plain(counts) for name, counts in by_operator(verdicts).items()],
        "reasons": dict(reasons(verdicts).most_common()),
    }


def table(verdicts: Sequence[Verdict]) -> str:
    """Counts of each operator, and of all, for people."""
    total = Counter(each.outcome for each in verdicts)
    rows: dict[str, Mapping[Outcome, int]] = {**by_operator(verdicts), "all": total}
    shown = [outcome for outcome in Outcome if total[outcome]]
    width = max(map(len, rows))
    lines = [f"{'':{width}} " + " ".join(f"{outcome:>8}" for outcome in shown)]
    for name, counts in rows.items():
        lines.append(f"{name:{width}} " + " ".join(f"{counts.get(outcome, 0):8}" for outcome in shown))
    return "\n".join(lines)


def _plain(counts: Mapping[Outcome, int]) -> dict[str, int]:
    return {outcome.value: counts[outcome] for outcome in Outcome if counts.get(outcome)}


def _list_of(target: str) -> Path:
    return FOLDER / f"{file_stem(target)}.txt"
