"""Imports of commands: what they leave to the process that they are made in."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path

import pytest

from hybridc.cli.support.imports import lasting_imports


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is installed, and has not been imported yet."""
    (tmp_path / "torch.py").write_text("Tensor = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)  # so that it goes again where none was
    monkeypatch.delitem(sys.modules, "torch")


def test_torch_is_not_found_meanwhile_and_is_there_afterwards(torch: None) -> None:
    with lasting_imports(), pytest.raises(ImportError):
        importlib.import_module("torch")
    assert importlib.import_module("torch").Tensor == 7


def test_torch_that_is_there_already_stays(torch: None) -> None:
    found = importlib.import_module("torch")
    with lasting_imports():
        assert importlib.import_module("torch") is found
    assert sys.modules["torch"] is found


@pytest.mark.parametrize("collects", [True, False])
def test_failed_import_leaves_all_as_it_was(torch: None, collects: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ImportError), lasting_imports():
            assert not gc.isenabled()
            importlib.import_module("no_such_module_at_all")
        assert gc.isenabled() is collects
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert "torch" not in sys.modules
