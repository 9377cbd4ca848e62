"""A user's program that is checked strictly finds the package's types."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_package_says_that_it_is_typed() -> None:
    assert (ROOT / "hybridc" / "py.typed").is_file()
    assert 'hybridc = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_program_of_a_user_is_checked_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text((ROOT / "tests" / "data" / "typed_user.py").read_text())
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--cache-dir=cache",
        "user.py",
    ]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
