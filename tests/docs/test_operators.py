"""docs/operators.md is what its script writes from the recorded result of onnx's suite."""

from __future__ import annotations

import json
from pathlib import Path

from tests.onnx_suite.page import PAGE, RESULT, page
from tests.onnx_suite.record import expected

ROOT = Path(__file__).parents[2]


def test_page_is_up_to_date():
    assert PAGE.read_text() == page(json.loads(RESULT.read_text()))


def test_result_is_that_of_the_list_of_tests_that_pass():
    for target in ("avx2",):
        record = json.loads((ROOT / "benchmarks" / "results" / f"onnx_suite_{target}.json").read_text())
        assert record["total"]["pass"] == len(expected(target))
