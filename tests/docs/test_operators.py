"""docs/operators.md is what its script writes from the recorded result of onnx's suite."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.onnx_suite.record import expected

ROOT = Path(__file__).parents[2]


def test_page_is_up_to_date():
    command = "import operators; print(operators.page(operators.read(operators.SUITE)), end='')"
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); {command}"
    written = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert (ROOT / "docs" / "operators.md").read_text() == written.stdout


def test_result_is_that_of_the_list_of_tests_that_pass():
    for target in ("avx2",):
        record = json.loads((ROOT / "benchmarks" / "results" / f"onnx_suite_{target}.json").read_text())
        assert record["total"]["pass"] == len(expected(target))
