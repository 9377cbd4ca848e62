"""Files of the user: found or refused with a suggestion, and written whole or not at all."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridc.errors import UsageError
from hybridc.scratch import scratch_folder

if TYPE_CHECKING:
    import numpy as np

_MANIFEST = "manifest.json"
_LONGEST_STEM = 100


def existing_file(path: Path, what: str) -> Path:
    """A readable file, or UsageError HC530 naming it and a file of almost the same name beside it."""
    _check_exists(path, what)
    if not path.is_file():
        is_artifact = (path / _MANIFEST).is_file()
        remedy = "it is a compiled artifact; name the ONNX model it was made from" if is_artifact else ""
        raise UsageError("HC530", f"{what} is not a file", where=str(path), remedy=remedy)
    if not os.access(path, os.R_OK):
        raise UsageError("HC530", f"{what} cannot be read", where=str(path), remedy="check its permissions")
    return path


def existing_artifact(path: Path) -> Path:
    """A folder that `hybridc compile` may have written, or UsageError HC530."""
    _check_exists(path, "the artifact")
    if not path.is_dir():
        raise UsageError(
            "HC530",
            "this is a file, and an artifact is a folder",
            where=str(path),
            remedy=f"compile a model first: hybridc compile MODEL.onnx -o {path.stem}.hyb",
        )
    return path


def check_artifact_place(path: Path) -> None:
    """Refuse to write an artifact over anything but an artifact. Raises UsageError HC531."""
    if path.is_dir() and ((path / _MANIFEST).exists() or not any(path.iterdir())):
        return
    if path.exists() or path.is_symlink():
        raise UsageError(
            "HC531",
            "the output exists and is not an artifact",
            where=str(path),
            remedy="choose another name with -o",
        )


def make_folder(path: Path) -> Path:
    """The folder, made where it is missing. Raises UsageError HC531."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("HC531", f"cannot make the folder: {error.strerror}", where=str(path)) from None
    return path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A name to write to in a fresh folder beside `path`; what is there afterwards moves into place.

    Other files written beside it, such as external data, move along. After an error nothing is left.
    Raises UsageError HC531 if the disk is full or the place cannot be written.
    """
    if path.is_dir():
        raise UsageError("HC531", "the output is a folder", where=str(path))
    make_folder(path.parent)
    try:
        with scratch_folder(".hybridc-", path.parent) as folder:
            yield folder / path.name
            for made in sorted(folder.iterdir()):
                os.replace(made, path.parent / made.name)
    except OSError as error:
        raise UsageError("HC531", f"cannot write: {error.strerror or error}", where=str(path)) from None


def read_array(path: Path) -> np.ndarray:
    """The array of a .npy file; never unpickles. Raises UsageError HC530 or HC533."""
    from numpy.lib import format as npy

    existing_file(path, "the input file")
    try:
        with path.open("rb") as stream:
            return npy.read_array(stream, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        what = f"cannot read an array: {error}"
        raise UsageError("HC533", what, where=str(path), remedy="write it with numpy.save") from None


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a .npy file, whole or not at all. Types that numpy has not, such as bfloat16, become float32."""
    import numpy as np

    with written_whole(path) as whole:
        np.save(whole, array.astype(np.float32) if array.dtype.kind == "V" else array, allow_pickle=False)


def safe_file_names(names: Iterable[str], suffix: str) -> dict[str, str]:
    """A file name of its own for each name: a model's names may hold slashes, dots or nothing at all."""
    taken: set[str] = set()
    result = {}
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".-")[:_LONGEST_STEM] or "output"
        candidate, number = stem, 2
        while candidate.lower() in taken:
            candidate, number = f"{stem}_{number}", number + 1
        taken.add(candidate.lower())
        result[name] = candidate + suffix
    return result


def print_json(data: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(data, indent=2))


def _check_exists(path: Path, what: str) -> None:
    if path.exists():
        return
    if not path.parent.is_dir():
        raise UsageError("HC530", f"{what} does not exist: there is no folder {path.parent}", where=str(path))
    close = difflib.get_close_matches(path.name, _names_in(path.parent), n=1)
    remedy = f"did you mean {path.with_name(close[0])}?" if close else ""
    raise UsageError("HC530", f"{what} does not exist", where=str(path), remedy=remedy)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
