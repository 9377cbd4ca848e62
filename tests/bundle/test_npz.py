"""The runner's .npz files: numpy's own writes and reads them, and damaged ones are refused."""

from __future__ import annotations

import io
import random
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridc.runtime import load
from tests.bundle.conftest import drawn, run_bundle
from tests.support.artifacts import SHAPE


def save(path: Path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


def test_arrays_go_in_and_out(cpu_artifact: Path, cpu_bundle: Path, tmp_path: Path) -> None:
    save(tmp_path / "in.npz", {"the/x": drawn(SHAPE)})
    made = tmp_path / "out.npz"
    done = run_bundle(cpu_bundle, f"--inputs={tmp_path / 'in.npz'}", f"--output={made}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"out/0: float32 4x6 -> {made}\n")
    with load(cpu_artifact) as session:
        expected = session.run(None, {"the/x": drawn(SHAPE)})
    with np.load(made) as arrays:
        assert arrays.files == ["out/0", "out/1", "out/2"]
        for name, array in zip(arrays.files, expected, strict=True):
            np.testing.assert_array_equal(arrays[name], array)
    with zipfile.ZipFile(made) as file:
        assert file.testzip() is None
    first = made.read_bytes()
    run_bundle(cpu_bundle, f"--inputs={tmp_path / 'in.npz'}", f"--output={made}")
    assert made.read_bytes() == first
    done = run_bundle(cpu_bundle, f"--inputs={made}", "--random")  # what the runner writes it can read
    assert "error[HC533]: the model has no input 'out/0'" in done.stderr


def archive(
    *entries: tuple[str, bytes], compression: int = zipfile.ZIP_STORED, comment: bytes = b""
) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        file.comment = comment
        for name, content in entries:
            file.writestr(name, content)
    return stream.getvalue()


def encoded(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def code_of(bundle: Path, path: Path, content: bytes, *words: str) -> str:
    path.write_bytes(content)
    done = run_bundle(bundle, f"--inputs={path}", *words)
    found = re.match(r"error\[(HC\d{3})\]", done.stderr)
    assert (done.returncode, found is None) in ((0, True), (2, False)), (done.returncode, done.stderr)
    return "" if found is None else found[1]


def test_archives_that_are_not_numpys_are_refused_or_read(cpu_bundle: Path, tmp_path: Path) -> None:
    name, good = "the/x.npy", encoded(drawn(SHAPE))
    plain = archive((name, good))
    cases: list[tuple[bytes, str]] = [
        (plain, ""),
        (archive((name, good), comment=b"a comment"), ""),
        (archive((name, good), compression=zipfile.ZIP_DEFLATED), "HC530"),
        (archive((name, good), (name[:-1] + "x", good)), "HC530"),
        (archive((name, good), ("the/y.npy", good)), "HC533"),
        (archive(("the/y.npy", good)), "HC533"),
        (archive(), "HC533"),
        (archive((name, good[:-1])), "HC530"),
        (archive((name, encoded(drawn(SHAPE).astype(np.float64)))), "HC553"),
        (archive((name, encoded(drawn(SHAPE).T.copy()))), "HC554"),
        (b"", "HC530"),
        (good, "HC530"),
        (plain[:-1], "HC530"),
        (plain + b"x", "HC530"),
        (plain.replace(b"the/x", b"the/y", 1), "HC530"),
        (plain.replace(good[-4:], b"abcd"), "HC530"),
    ]
    with pytest.warns(UserWarning, match="Duplicate name"):
        cases.append((archive((name, good), (name, good)), "HC530"))
    path = tmp_path / "in.npz"
    for number, (content, code) in enumerate(cases):
        assert code_of(cpu_bundle, path, content) == code, number
    np.save(tmp_path / "x.npy", drawn(SHAPE))
    assert code_of(cpu_bundle, path, plain, f"--input=the/x={tmp_path / 'x.npy'}") == "HC533"
    assert code_of(cpu_bundle, path, plain, "--output=/proc/none/out.npz") == "HC531"
    assert run_bundle(cpu_bundle, "--inputs=/none.npz").stderr.startswith("error[HC530]")


def test_numbers_that_lie_ask_for_no_memory(cpu_bundle: Path, tmp_path: Path) -> None:
    """Sizes, offsets and counts at the ends of their ranges, in 32 and in 64 bits."""
    content = archive(("the/x.npy", encoded(drawn(SHAPE))))
    end, central = content.rindex(b"PK\5\6"), content.rindex(b"PK\1\2")
    for place, size in (
        (end + 10, 2),
        (end + 12, 4),
        (end + 16, 4),
        (central + 20, 4),
        (central + 24, 4),
        (central + 28, 2),
        (central + 30, 2),
        (central + 32, 2),
        (central + 42, 4),
    ):
        for value in (2 ** (8 * size) - 1, 2 ** (8 * size) - 2, 2 ** (8 * size - 1)):
            damaged = content[:place] + value.to_bytes(size, "little") + content[place + size :]
            assert code_of(cpu_bundle, tmp_path / "in.npz", damaged) in ("HC530", "")
    for number in (2**64 - 1, 2**64 - 60, 2**63, len(content)):
        end64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, 1, 1, number, number)
        locator = struct.pack("<IIQI", 0x07064B50, 0, end, 1)
        tail = content[end : end + 10] + b"\xff" * 10 + content[end + 20 :]
        damaged = content[:end] + end64 + locator + tail
        assert code_of(cpu_bundle, tmp_path / "in.npz", damaged) == "HC530"


@pytest.mark.parametrize("seed", range(3))
def test_random_damage_never_ends_the_process_by_a_signal(
    cpu_bundle: Path, tmp_path: Path, seed: int
) -> None:
    content, draw = archive(("the/x.npy", encoded(drawn(SHAPE)))), random.Random(seed)
    codes = set()
    for _ in range(40):
        damaged = bytearray(content)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        if draw.random() < 0.2:
            del damaged[draw.randrange(len(damaged)) :]
        codes.add(code_of(cpu_bundle, tmp_path / "in.npz", bytes(damaged)))
    assert "HC530" in codes and codes <= {"", "HC530", "HC533", "HC553", "HC554"}
