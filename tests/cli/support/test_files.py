"""Files of the user: read safely, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.cli.support.files import (
    existing_file,
    named_value,
    read_array,
    safe_file_names,
    write_array,
    written_whole,
)
from hybridc.errors import UsageError


@given(st.lists(st.text(), unique=True))
def test_file_names_are_distinct_and_stay_in_their_folder(names: list[str]) -> None:
    files = safe_file_names(names, ".npy")
    assert list(files) == names
    assert len({file.lower() for file in files.values()}) == len(names)
    for file in files.values():
        assert (
            Path(file).name == file and not file.startswith((".", "-")) and len(file) < 130 and file.isascii()
        )


def test_file_names_keep_what_is_harmless() -> None:
    files = safe_file_names(["prob_1", "a/b", "a:b", "../../etc/passwd", ""], ".npy")
    assert list(files.values()) == ["prob_1.npy", "a_b.npy", "a_b_2.npy", "_.._etc_passwd.npy", "output.npy"]


def test_pickles_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "evil.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(UsageError, match="Object arrays") as refusal:
        read_array(tmp_path / "evil.npy")
    assert refusal.value.code == "HC533"


@pytest.mark.parametrize(
    "content", [b"", b"no array", b"\x93NUMPY\x01\x00v\x00{'descr'", b"PK\x03\x04", b"\x80\x04N."]
)
def test_files_without_an_array_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(UsageError) as refusal:
        read_array(path)
    assert refusal.value.code == "HC533"


def test_bfloat16_is_written_as_float32(tmp_path: Path) -> None:
    write_array(tmp_path / "b.npy", np.array([1.5, -2], ml_dtypes.bfloat16))
    assert np.load(tmp_path / "b.npy").dtype == np.float32


def test_failed_writing_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out.bin"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), written_whole(path) as whole:
        whole.write_text("half of the n")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_written_beside_move_along(tmp_path: Path) -> None:
    with written_whole(tmp_path / "m.onnx") as whole:
        whole.write_text("model")
        whole.with_name("m.onnx.data").write_text("weights")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]


def test_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No space left") as refusal, written_whole(tmp_path / "x") as whole:
        raise OSError(28, "No space left on device", str(whole))
    assert refusal.value.where == str(tmp_path / "x")


def test_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"), written_whole(tmp_path):
        pass


def test_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(UsageError, match="cannot create the folder") as refusal:
        write_array(tmp_path / "f" / "x.npy", np.zeros(1))
    assert refusal.value.remedy == "choose another location"


@pytest.mark.parametrize("name", ["", "absent", "no/folder"])
def test_missing_file_is_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError) as refusal:
        existing_file(tmp_path / name, "the model")
    assert (refusal.value.code, bool(refusal.value.remedy)) == ("HC530", True)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("rate=16000", np.array(16000)),
        ("a=b=-1", np.array(-1)),
        ("axes=1,2", np.array([1, 2])),
        ("scale=1,.5e1", np.array([1, 5], np.float32)),
        ("axes=1,", np.array([1])),
        ("flag=true", np.array(True)),
        ("flags=true,false", np.array([True, False])),
    ],
)
def test_values_are_numbers(text: str, wanted: np.ndarray) -> None:
    name, value = named_value(text)
    assert name == text.rpartition("=")[0] and isinstance(value, np.ndarray)
    assert value.dtype == wanted.dtype and np.array_equal(value, wanted)


def test_values_are_files_else() -> None:
    assert named_value("axes=1.npy") == ("axes", Path("1.npy"))
    assert named_value("flag=True") == ("flag", Path("True"))
    for text in ("axes", "axes=", "=1"):
        with pytest.raises(UsageError, match="invalid value") as refusal:
            named_value(text)
        assert refusal.value.code == "HC533"
