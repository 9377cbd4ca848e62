"""`make bench`: says how long it takes, and runs the parts that are asked for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def scripts(*words: str) -> list[str]:
    """The benchmarks that `make bench` would run, with their options."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    command = ["make", "--dry-run", "--directory", str(ROOT), "bench", *words]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "five hours" in printed
    return [line.partition("benchmarks/")[2] for line in printed.splitlines() if "python benchmarks/" in line]


def test_every_benchmark_that_it_runs_exists() -> None:
    found = scripts()
    paths = [ROOT / "benchmarks" / script.split()[0] for script in found]
    assert [path for path in paths if not (path.is_file() or (path / "__main__.py").is_file())] == []
    assert found[-1] == "readme.py" and "cpu.py --isa avx512" in found and "training.py" in found
    assert {"regret.py", "published", "plans.py --drawn 20 --seed 1 --seconds 10 --later 60"} <= {*found}


def test_parts_can_be_chosen() -> None:
    assert scripts("PARTS=memory conv1d-avx512_bf16") == [
        "memory.py",
        "conv1d.py --isa avx512_bf16",
        "readme.py",
    ]


def test_convolution_benchmark_finds_its_parts() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "conv1d.py"), "-h"]
    assert "--isa" in subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
