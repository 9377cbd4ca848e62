"""An artifact that is replaced, overwritten or cut while it is loaded and used: old or new, or refused."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hybridc.artifact.store import put_in_place
from hybridc.errors import ArtifactError
from hybridc.runtime import load
from tests.support.artifacts import CPU, SHAPE, cpu_model, negate, scheduled, weight_array
from tests.support.process import open_handles

pytestmark = pytest.mark.isa("avx2")

X = np.random.default_rng(3).standard_normal(SHAPE, dtype=np.float32)
LOADS = int(os.environ.get("HYBRIDC_LOADS", "20000"))
"""Of the long test."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Artifacts of one interface: relu(x @ w), and -(x @ 2w)."""
    folder, model = tmp_path_factory.mktemp("two"), cpu_model()
    functions = {**model.functions, ("relu", CPU): scheduled(negate((4, 6)), CPU)}
    other = replace(model, functions=functions, weights={"w": 2 * weight_array((8, 6))})
    return model.write(folder / "one.hyb"), other.write(folder / "other.hyb")


def outputs(path: Path) -> tuple[bytes, bytes]:
    """What a fresh session computes, the weight that is an output included."""
    with load(path, threads=1) as session:
        y, w = session.run(["out/0", "out/1"], {"the/x": X})
        return y.tobytes(), w.tobytes()


@contextmanager
def meanwhile(change: Callable[[int], object]) -> Iterator[threading.Thread]:
    """Do something again and again beside the block, in a thread that an error ends."""
    ended = threading.Event()

    def work() -> None:
        round_number = 0
        while not ended.is_set():
            change(round_number)
            round_number += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        thread.join()


def exchanged(two: tuple[Path, Path], path: Path) -> Callable[[int], object]:
    """Put a copy of each in its place by turns, as compilations do."""

    def change(number: int) -> None:
        copy = Path(shutil.copytree(two[number % 2], path.with_name("fresh")))
        put_in_place(copy, path)
        shutil.rmtree(copy, ignore_errors=True)

    return change


def renamed(two: tuple[Path, Path], path: Path) -> Callable[[int], object]:
    """Remove what is there, then give another its name."""

    def change(number: int) -> None:
        copy = Path(shutil.copytree(two[number % 2], path.with_name("fresh")))
        shutil.rmtree(path)
        copy.rename(path)

    return change


def overwritten(two: tuple[Path, Path], path: Path) -> Callable[[int], object]:
    """Write the files of each over those of the other, in place.

    None becomes shorter before it is written: weights that are mapped and not there end the process.
    """

    def change(number: int) -> None:
        for source in two[number % 2].iterdir():
            with (path / source.name).open("r+b") as file:
                file.write(source.read_bytes())
                file.truncate()

    return change


@pytest.mark.parametrize("loads", [100, pytest.param(LOADS // 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("how", "refusals"), [(exchanged, set()), (renamed, {"HC301", "HC304"})], ids=["exchanged", "renamed"]
)
def test_load_is_of_one_artifact_while_another_takes_its_place(
    two: tuple[Path, Path],
    tmp_path: Path,
    loads: int,
    how: Callable[[tuple[Path, Path], Path], Callable[[int], object]],
    refusals: set[str],
) -> None:
    expected = {outputs(path): path.name for path in two}
    path = Path(shutil.copytree(two[0], tmp_path / "model.hyb"))
    found: Counter[str] = Counter()

    def enough() -> bool:
        return found["one.hyb"] + found["other.hyb"] >= loads and min(found[p.name] for p in two) > 0

    with meanwhile(how(two, path)) as thread:
        while not enough() and thread.is_alive():
            try:
                found[expected[outputs(path)]] += 1  # KeyError: a mixture of both
            except ArtifactError as error:
                assert error.code in refusals, error
                found[error.code] += 1
                time.sleep(0.001)  # the other thread may be where nothing is there
    print(dict(found))
    assert enough()


def test_file_overwritten_in_place_is_refused_and_never_believed(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    whole = {outputs(path) for path in two}
    path = Path(shutil.copytree(two[0], tmp_path / "model.hyb"))
    with meanwhile(overwritten(two, path)):
        for _ in range(100):
            try:
                assert outputs(path) in whole
            except ArtifactError as error:
                assert error.code in ("HC301", "HC303", "HC304"), error


@pytest.mark.parametrize("size_bytes", [0, 64])
def test_weights_that_were_cut_after_loading_end_no_process(
    two: tuple[Path, Path], tmp_path: Path, size_bytes: int
) -> None:
    path = Path(shutil.copytree(two[0], tmp_path / "model.hyb"))
    with load(path) as session:
        session.run(None, {"the/x": X})
        os.truncate(path / "weights.bin", size_bytes)
        for _ in range(2):
            with pytest.raises(ArtifactError) as caught:
                session.run(None, {"the/x": X})
            assert caught.value.code == "HC304"
            session.release()


def test_released_session_goes_on_with_the_files_that_it_loaded(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(two[0], tmp_path / "model.hyb"))
    with load(path) as session:
        expected = session.run(None, {"the/x": X})
        session.release()
        put_in_place(Path(shutil.copytree(two[1], tmp_path / "fresh")), path)
        for found, value in zip(session.run(None, {"the/x": X}), expected, strict=True):
            np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize("loads", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_loads_leave_no_handle_open(two: tuple[Path, Path], loads: int) -> None:
    outputs(two[0])
    before = open_handles()
    for _ in range(loads):
        outputs(two[0])
    assert open_handles() <= before
