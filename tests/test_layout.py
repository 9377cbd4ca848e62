"""The three linked packages are there: a checkout without symlinks would build a wheel that lacks them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hybridc


@pytest.mark.parametrize("name", ["passes", "schedules", "models"])
def test_the_linked_packages_are_the_folders_at_the_top(name):
    module = importlib.import_module(f"hybridc.{name}")
    link = Path(hybridc.__path__[0]) / name
    assert link.is_symlink() == (Path(hybridc.__path__[0]).parent / "pyproject.toml").exists()
    assert module.__file__ is not None and Path(module.__file__).exists()


def test_importing_hybridc_loads_no_compiler():
    program = "import hybridc, sys; print(*sys.modules, sep='\\n')"
    printed = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert not {"tvm", "onnx"} & set(printed.stdout.splitlines())
