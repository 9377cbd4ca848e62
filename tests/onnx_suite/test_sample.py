"""A sample of onnx's backend tests, and the books that are kept of all: `make onnx-suite` runs the whole."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.onnx_suite import pool
from tests.onnx_suite.pool import run_tests
from tests.onnx_suite.record import Outcome, Verdict, by_operator, expected, reasons, surprises

SAMPLE = 10
NETWORKS = ("test_inception", "test_densenet", "test_vgg", "test_resnet", "test_bvlc", "test_zfnet")


def drawn(names: list[str]) -> list[str]:
    listed = expected("avx2")
    small = [name for name in names if name in listed and not name.startswith(NETWORKS)]
    return random.Random(0).sample(small, SAMPLE)


@pytest.mark.isa("avx2")
def test_a_sample_of_those_that_pass_passes():
    verdicts = run_tests("avx2", drawn, workers=1, limit_seconds=300)
    assert len(verdicts) == SAMPLE
    assert surprises(verdicts, expected("avx2")) == []


@pytest.mark.slow
@pytest.mark.isa("avx2")
def test_the_whole_suite_gives_what_is_recorded():
    verdicts = run_tests("avx2", lambda names: names, workers=1, limit_seconds=300)
    assert surprises(verdicts, expected("avx2")) == []


def verdict(test: str, outcome: Outcome, operator: str = "") -> Verdict:
    return Verdict(test, outcome, f"because of {test}", operator)


def test_a_surprise_is_any_change_and_any_fault():
    found = [
        verdict("as_before", Outcome.PASS),
        verdict("gained", Outcome.PASS),
        verdict("lost", Outcome.REFUSED),
        verdict("never", Outcome.REFUSED),
        verdict("wrong", Outcome.WRONG),
        verdict("broken", Outcome.INTERNAL),
    ]
    assert [line.partition(":")[0] for line in surprises(found, {"as_before", "lost"})] == [
        "gained",
        "lost",
        "wrong",
        "broken",
    ]


def test_a_function_body_counts_for_its_operator():
    found = [
        verdict("test_elu", Outcome.PASS, "Elu"),
        verdict("test_elu_expanded_ver18", Outcome.REFUSED),
        verdict("test_network", Outcome.PASS),
    ]
    assert by_operator(found) == {
        "(several)": Counter({Outcome.PASS: 1}),
        "Elu": Counter({Outcome.PASS: 1, Outcome.REFUSED: 1}),
    }


def test_names_and_numbers_make_no_other_reason():
    texts = ["HC111 input 'x' has 3 dimensions", "HC111 input 'data' has 14 dimensions"]
    found = [Verdict(str(i), Outcome.REFUSED, text) for i, text in enumerate(texts)]
    assert reasons(found) == {"HC111 input '_' has N dimensions": 2}


DYING = """
import json, os, sys, time
print(json.dumps(["test_well", "test_dies", "test_hangs"]), flush=True)
for line in sys.stdin:
    name = line.strip()
    if name == "test_dies":
        os._exit(3)
    if name == "test_hangs":
        time.sleep(60)
    print(json.dumps({"test": name, "outcome": "pass", "reason": "", "operator": "Abs"}), flush=True)
"""


def test_a_worker_that_dies_or_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text(DYING)
    monkeypatch.setattr(pool, "command", lambda target: [sys.executable, str(script)])
    found = run_tests(
        "avx2", lambda names: ["test_dies", "test_hangs", "test_well"], workers=1, limit_seconds=2
    )
    outcomes = {each.test: each.outcome for each in found}
    assert outcomes == {
        "test_dies": Outcome.CRASH,
        "test_hangs": Outcome.TIMEOUT,
        "test_well": Outcome.PASS,
    }
