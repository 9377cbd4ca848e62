"""The command of the training benchmarks that README and Makefile give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "training.py"


def test_training_benchmarks_start_by_their_documented_command():
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    printed = subprocess.run([sys.executable, SCRIPT, "-h"], stdout=subprocess.PIPE, text=True, check=True)
    assert "gradients, curves, speed, bf16, memory, pinning" in printed.stdout
