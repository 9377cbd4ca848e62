"""Checkpoints: whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hybridc.errors import UsageError
from hybridc.training.checkpoint import (
    FILE,
    Checkpoint,
    Evaluated,
    TrainingProgress,
    read_checkpoint,
    write_checkpoint,
)


def checkpoint(seed: int = 0) -> Checkpoint:
    random = np.random.default_rng(seed)
    model = {
        "a/b::weight": random.standard_normal((3, 4)).astype(np.float32),
        "file": np.zeros(2, np.float32),
    }
    optimizer = {"a/b::weight#momentum": random.standard_normal((3, 4)), "step": np.array(7, np.int64)}
    progress = TrainingProgress(5, 1, 3, (2.5, 1.25), (Evaluated(2, 1.5, 0.75), Evaluated(4, 1.0, None)))
    return Checkpoint(model, optimizer, progress, {"model": "abc", "batch": 16})


def assert_same(found: Checkpoint | None, expected: Checkpoint) -> None:
    assert found is not None
    assert found.progress == expected.progress and found.identity == expected.identity
    for part in ("model", "optimizer"):
        assert list(getattr(found, part)) == list(getattr(expected, part))
        for name, value in getattr(expected, part).items():
            np.testing.assert_array_equal(getattr(found, part)[name], value)


def test_checkpoint_is_read_as_written(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path / "new") is None
    write_checkpoint(tmp_path / "new", checkpoint())
    assert_same(read_checkpoint(tmp_path / "new"), checkpoint())


def test_failure_while_writing_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, checkpoint(0))
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        write_checkpoint(tmp_path, checkpoint(1))
    assert_same(read_checkpoint(tmp_path), checkpoint(0))
    assert os.listdir(tmp_path) == [FILE]


def test_half_written_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / f".{FILE}-abandoned").write_bytes(b"half")
    write_checkpoint(tmp_path, checkpoint())
    assert os.listdir(tmp_path) == [FILE]


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"PK\3\4"]
)
def test_damaged_checkpoint_is_refused(tmp_path: Path, damage: object) -> None:
    write_checkpoint(tmp_path, checkpoint())
    path = tmp_path / FILE
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UsageError) as caught:
        read_checkpoint(tmp_path)
    assert caught.value.code == "HC578"


def test_changed_byte_of_a_state_is_noticed(tmp_path: Path) -> None:
    expected = checkpoint()
    write_checkpoint(tmp_path, expected)
    data = bytearray((tmp_path / FILE).read_bytes())
    place = bytes(data).index(expected.model["a/b::weight"].tobytes())
    data[place] ^= 1
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(UsageError):
        read_checkpoint(tmp_path)
