"""Write docs/operators.md: which of ONNX's operators are taken, by the importer and by onnx's suite.

python -m tests.onnx_suite.page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx

from hybridc.frontend.expand.table import EXPANSIONS, MICROSOFT
from hybridc.frontend.importer import supported_operators
from hybridc.frontend.opsets import NEWEST_OPSET
from tests.onnx_suite.cases import DISPUTED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operators.md"
RESULT = ROOT / "benchmarks" / "results" / "onnx_suite_avx2.json"


def main() -> None:
    PAGE.write_text(page(json.loads(RESULT.read_text())))


def page(suite: dict[str, Any]) -> str:
    """The page as Markdown."""
    rows = {row["operator"]: row for row in suite["rows"]}
    known, total = supported_operators() | expanded(""), suite["total"]
    operators = sorted({schema.name for schema in standard_operators()})
    tests = sum(total.values())
    lines = [
        "# Operators",
        "",
        "Written by `python -m tests.onnx_suite.page`."
        f" Models of opsets 1 to {NEWEST_OPSET} are taken. Of the"
        f" {len(operators)} operators of ONNX {suite['onnx']}, hybridc takes"
        f" {sum(name in known for name in operators)}; every other one is refused by name (HC113),"
        " as are uses of an operator that would be computed wrong (HC114).",
        "",
        f"The {tests} tests are those of onnx's own suite (`make onnx-suite`, `avx2`, {suite['date']}):"
        f" {told(total)}. Left out are {len(DISPUTED)} whose results contradict the operator's text"
        " (`tests/onnx_suite/cases.py`). Inputs that shapes are computed from are constants there,"
        " as with `--value`.",
        "",
        "| operator | taken | tests passed |",
        "|---|---|---|",
    ]
    for name in operators:
        lines.append(f"| {name} | {'yes' if name in known else 'no'} | {passed(rows.get(name))} |")
    microsoft = ", ".join(sorted(expanded(MICROSOFT)))
    lines += ["", f"Of the domain `{MICROSOFT}`: {microsoft}.", "", "Nodes of these are refused by name"]
    lines[-1] += " where they are used in a way that is not supported (HC114)."
    others = [name for name in rows if name not in operators]
    lines += ["", "Tests of other domains, and of several operators at once:", ""]
    lines += ["| tests of | passed |", "|---|---|"]
    lines += [f"| {name} | {passed(rows[name])} |" for name in others]
    lines += ["", "Why tests do not pass:", "", "| tests | reason |", "|---|---|"]
    lines += [f"| {count} | {reason.replace('|', ' ')} |" for reason, count in suite["reasons"].items()]
    return "\n".join(lines) + "\n"


def expanded(domain: str) -> set[str]:
    """Operators of a domain that become others before import."""
    return {name for of, name in EXPANSIONS if of == domain}


def standard_operators() -> list[onnx.defs.OpSchema]:
    """Operators of the default domain that are not deprecated."""
    return [schema for schema in onnx.defs.get_all_schemas() if schema.domain == "" and not schema.deprecated]


def told(total: dict[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in total.items())


def passed(row: dict[str, Any] | None) -> str:
    """`3 of 4`; nothing where the suite has no test."""
    if row is None:
        return ""
    counts = [count for name, count in row.items() if name != "operator"]
    return f"{row.get('pass', 0)} of {sum(counts)}"


if __name__ == "__main__":
    main()
