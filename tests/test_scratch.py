"""Scratch folders go away, however their block or the process ends."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridc.scratch import SUFFIX, remove_scratch_folders, scratch_folder


def test_folder_is_fresh_and_removed_after_success_and_error(tmp_path: Path) -> None:
    with scratch_folder("half-done-", tmp_path) as folder:
        assert folder.parent == tmp_path and folder.name.startswith("half-done-")
        (folder / "sub").mkdir()
    with pytest.raises(KeyboardInterrupt), scratch_folder("half-done-", tmp_path):
        raise KeyboardInterrupt
    assert not any(tmp_path.iterdir())


def test_folder_that_was_moved_into_place_is_kept(tmp_path: Path) -> None:
    with scratch_folder("half-done-", tmp_path) as folder:
        folder.rename(tmp_path / "done")
    assert [path.name for path in tmp_path.iterdir()] == ["done"]


def test_all_open_folders_can_be_removed_at_once(tmp_path: Path) -> None:
    with scratch_folder("a-", tmp_path), scratch_folder("b-", tmp_path):
        remove_scratch_folders()
        assert not any(tmp_path.iterdir())


def killed_in_a_scratch_folder(parent: Path) -> None:
    """What a process leaves that is killed while it works."""
    code = (
        "import os, pathlib, sys; from hybridc.scratch import scratch_folder\n"
        "with scratch_folder('.model.hyb-', pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').touch(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(parent)], check=False)


def test_folders_of_killed_processes_are_removed_by_the_next_and_no_others(tmp_path: Path) -> None:
    killed_in_a_scratch_folder(tmp_path)
    (abandoned,) = tmp_path.iterdir()
    kept = [tmp_path / ".model.hyb-backup01", tmp_path / f".other.hyb-backup01{SUFFIX}"]
    for folder in kept:
        folder.mkdir()
    with scratch_folder(".model.hyb-", tmp_path) as first, scratch_folder(".model.hyb-", tmp_path) as second:
        assert first.exists() and second.exists(), "two at once leave each other alone"
        assert not abandoned.exists()
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_many_at_once_never_lose_a_folder(tmp_path: Path) -> None:
    def work(_: int) -> bool:
        with scratch_folder("busy-", tmp_path) as folder:
            (folder / "file").touch()
            return (folder / "file").exists()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))
    assert not any(tmp_path.iterdir())
