"""Damaged checkpoints and training.json: refused by name, or right."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import hybridc
from hybridc.errors import ArtifactError, UsageError
from hybridc.json_values import sealed
from hybridc.training.artifact import EVALUATE, MANIFEST, STATES, STEP, open_training
from hybridc.training.checkpoint import FILE, read_checkpoint, write_checkpoint
from tests.support.file_edits import damaged, edited
from tests.training.conftest import BATCH, examples
from tests.training.test_checkpoint import assert_same, checkpoint


@pytest.mark.parametrize("count", [600, pytest.param(6000, marks=pytest.mark.slow)])
def test_damaged_checkpoint_is_refused_or_right(tmp_path: Path, count: int) -> None:
    write_checkpoint(tmp_path, checkpoint())
    whole = (tmp_path / FILE).read_bytes()
    for seed in range(count):
        (tmp_path / FILE).write_bytes(damaged(whole, Random(seed)))
        try:
            assert_same(read_checkpoint(tmp_path), checkpoint())
        except UsageError as error:
            assert error.code == "HC578", seed


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_checkpoint_with_another_header_is_refused_or_of_the_right_types(tmp_path: Path, count: int) -> None:
    write_checkpoint(tmp_path, checkpoint())
    with np.load(tmp_path / FILE) as archive:
        arrays = dict(archive)
    header = json.loads(arrays.pop("header").tobytes())
    for seed in range(count):
        content = json.dumps(edited(header, Random(seed))).encode()
        np.savez(tmp_path / FILE, header=np.frombuffer(content, np.uint8), **arrays)
        try:
            found = read_checkpoint(tmp_path)
            assert found is not None and all(isinstance(loss, float) for loss in found.progress.losses)
            assert all(isinstance(name, str) for name in (*found.model, *found.optimizer))
            assert min(found.progress.epoch, found.progress.position, found.progress.seed) >= 0
        except UsageError as error:
            assert error.code == "HC578", seed


def test_checkpoint_of_a_run_that_diverged_is_read(tmp_path: Path) -> None:
    expected = checkpoint()
    object.__setattr__(expected.progress, "losses", (1.0, float("inf"), float("nan")))
    write_checkpoint(tmp_path, expected)
    found = read_checkpoint(tmp_path)
    assert found is not None and repr(found.progress) == repr(expected.progress)


def test_compressed_checkpoint_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / FILE, header=np.zeros(1 << 20, np.uint8))
    with pytest.raises(UsageError, match="compressed"):
        read_checkpoint(tmp_path)


def test_checkpoint_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(UsageError) as caught:
        read_checkpoint(tmp_path)
    assert caught.value.code == "HC578"


@pytest.fixture
def copy(step_artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(step_artifact, tmp_path / "copy.hyb"))


def code_of_refusal(path: Path) -> str | None:
    try:
        open_training(path).initial_values()
    except ArtifactError as error:
        assert error.what and error.where and error.remedy
        return error.code
    return None


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_no_byte_of_training_json_can_change_what_it_says(copy: Path, count: int) -> None:
    whole = (copy / MANIFEST).read_bytes()
    for seed in range(count):
        content = damaged(whole, Random(seed))
        (copy / MANIFEST).write_bytes(content)
        code = code_of_refusal(copy)
        assert code in ("HC310", "HC311") or json.loads(content) == json.loads(whole), seed


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_edited_training_json_is_refused_or_harmless(copy: Path, count: int) -> None:
    whole = json.loads((copy / MANIFEST).read_text())
    for seed in range(count):
        (copy / MANIFEST).write_text(json.dumps(sealed(edited(whole, Random(seed)))))
        assert code_of_refusal(copy) in (None, "HC310", "HC311", "HC312"), seed


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_step_of_an_edited_training_json_is_refused_or_made(copy: Path, count: int) -> None:
    whole = json.loads((copy / MANIFEST).read_text())
    images, labels = examples(BATCH)
    for seed in range(count):
        (copy / MANIFEST).write_text(json.dumps(sealed(edited(whole, Random(seed)))))
        try:
            with hybridc.load_training(copy) as session:
                session.step(images, labels)
        except (ArtifactError, UsageError) as error:
            assert error.code in ("HC310", "HC311", "HC312", "HC577"), seed


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: data.update(loss="nothing"), "HC311"),
        (lambda data: data.update(inputs=["nothing"]), "HC311"),
        (lambda data: data["states"].pop(), "HC311"),
        (lambda data: data["states"][-1].update(shape=[1 << 44]), "HC311"),
        (lambda data: data["scalars"].clear(), "HC311"),
        (lambda data: data["programs"].update(step="0" * 64), "HC312"),
    ],
)
def test_training_json_that_does_not_fit_its_step_is_refused(copy: Path, change: Any, code: str) -> None:
    data = json.loads((copy / MANIFEST).read_text())
    change(data)
    (copy / MANIFEST).write_text(json.dumps(sealed(data)))
    with pytest.raises(ArtifactError) as caught:
        hybridc.load_training(copy)
    assert caught.value.code in (code, "HC312")


def test_program_of_another_step_is_refused(copy: Path) -> None:
    shutil.rmtree(copy / EVALUATE)
    shutil.copytree(copy / STEP, copy / EVALUATE)
    images, labels = examples(BATCH)
    with hybridc.load_training(copy) as session, pytest.raises(ArtifactError) as caught:
        session.evaluate(images, labels)
    assert caught.value.code == "HC312"


def test_states_that_are_no_file_are_refused(copy: Path) -> None:
    (copy / STATES).unlink()
    os.mkfifo(copy / STATES)
    assert code_of_refusal(copy) == "HC312"
