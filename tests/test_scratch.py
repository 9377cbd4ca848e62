"""Scratch folders go away, however their block or the process ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridc.scratch import remove_scratch_folders, scratch_folder


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
