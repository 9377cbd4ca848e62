"""docs/errors.md lists exactly the codes that the source raises, in the groups of their exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridc import errors
from hybridc.cli import main

ROOT = Path(__file__).parents[2]
GROUPS: dict[str, type[errors.HybridcError]] = {
    "1": errors.ModelError,
    "2": errors.PlanError,
    "3": errors.ArtifactError,
    "4": errors.DeviceError,
    "5": errors.UsageError,
    "9": errors.InternalError,
}
CODE = re.compile(r"\bHC\d{3}\b")


def raised() -> set[str]:
    """Codes that stand as strings of their own in the product's source."""
    folders = [ROOT / name for name in ("hybridc", "passes", "schedules", "models")]
    kinds = ("*.py", "*.cc", "*.h")
    files = [path for folder in folders for kind in kinds for path in folder.rglob(kind)]
    return {code for path in files for code in re.findall(r'"(HC\d{3})"', path.read_text())}


def listed() -> dict[str, str]:
    """Codes of the page, and the heading that each stands under."""
    found = {}
    for line in (ROOT / "docs" / "errors.md").read_text().splitlines():
        if line.startswith("## "):
            heading = line
        elif line.startswith("| HC"):
            [code] = CODE.findall(line.split("|")[1])
            assert code not in found, f"{code} is listed twice"
            found[code] = heading
    return found


def test_every_code_is_listed_and_every_listed_code_is_raised() -> None:
    assert set(listed()) == raised()


def test_codes_stand_under_the_exit_code_of_their_group() -> None:
    for code, heading in listed().items():
        assert f"(exit code {GROUPS[code[2]].exit_code})" in heading, code


def test_example_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"    \$ hybridc (.*)\n((?:    .*\n)+)", (ROOT / "docs" / "errors.md").read_text())
    assert block is not None
    assert main(block[1].split()) == errors.UsageError.exit_code
    assert capsys.readouterr().err.split() == block[2].split()
