"""Files of the user: found or refused with a suggestion, and written whole or not at all."""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridc.errors import UsageError
from hybridc.scratch import scratch_folder

if TYPE_CHECKING:
    import numpy as np

    from hybridc.ir import Device

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ELSEWHERE = "choose another location"
_MANIFEST = "manifest.json"
_LONGEST_STEM = 100
_DECIMAL = r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d{1,3})?"
_TORCH = "torch.onnx.export(model, args, 'model.onnx') in PyTorch"
_KERAS = "python -m tf2onnx.convert --keras MODEL --output model.onnx"
_EXPORTS = {
    ".pt": _TORCH,
    ".pth": _TORCH,
    ".ckpt": _TORCH,
    ".safetensors": _TORCH,
    ".h5": _KERAS,
    ".keras": _KERAS,
    ".tflite": "python -m tf2onnx.convert --tflite MODEL --output model.onnx",
}
"""How models of other formats become ONNX, by their suffix."""


def existing_file(path: Path, what: str) -> Path:
    """A readable file, or UsageError HC530 naming it and a file of almost the same name beside it."""
    _check_exists(path, what)
    if not path.is_file():
        is_artifact = (path / _MANIFEST).is_file()
        of_artifact = "it is a compiled artifact; give the ONNX model it was compiled from"
        remedy = of_artifact if is_artifact else "give a file"
        raise UsageError("HC530", f"{what} is not a file", where=str(path), remedy=remedy)
    if not os.access(path, os.R_OK):
        raise UsageError("HC530", f"{what} cannot be read", where=str(path), remedy="check its permissions")
    return path


def existing_model(path: Path) -> Path:
    """A readable file that may be an ONNX model, or UsageError HC530."""
    if path.is_dir() and not (path / _MANIFEST).is_file():
        models = [name for name in _names_in(path) if name.endswith(".onnx")]
        remedy = f"did you mean {path / models[0]}?" if models else "give an .onnx file"
        raise UsageError("HC530", "the model is a folder", where=str(path), remedy=remedy)
    existing_file(path, "the model")
    export = _EXPORTS.get(path.suffix.lower())
    if export is not None:
        what = f"the model is a {path.suffix} file, not an ONNX model"
        raise UsageError("HC530", what, where=str(path), remedy=f"export it: {export}")
    if path.stat().st_size == 0 and path.is_file():
        remedy = "export it again, or check that the download is complete"
        raise UsageError("HC530", "the model is an empty file", where=str(path), remedy=remedy)
    return path


def existing_artifact(path: Path) -> Path:
    """A folder that `hybridc compile` may have written, or UsageError HC530."""
    _check_exists(path, "the artifact")
    if not path.is_dir():
        model = path if path.suffix == ".onnx" else "MODEL.onnx"
        raise UsageError(
            "HC530",
            "expected the folder of an artifact, found a file",
            where=str(path),
            remedy=f"compile a model first: hybridc compile {model} -o {path.stem}.hyb",
        )
    return path


def make_folder(path: Path) -> Path:
    """The folder, made where it is missing. Raises UsageError HC531."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot create the folder: {error.strerror}"
        raise UsageError("HC531", what, where=str(path), remedy=_ELSEWHERE) from None
    return path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A name to write to in a fresh folder beside `path`; what is there afterwards moves into place.

    Other files written beside it, such as external data, move along. After an error nothing is left.
    Raises UsageError HC531 if the disk is full or the place cannot be written.
    """
    if path.is_dir():
        raise UsageError("HC531", "the output is a folder", where=str(path), remedy="give a file")
    make_folder(path.parent)
    try:
        with scratch_folder(".hybridc-", path.parent) as folder:
            yield folder / path.name
            for made in sorted(folder.iterdir()):
                os.replace(made, path.parent / made.name)
    except OSError as error:
        what = f"cannot write: {error.strerror or error}"
        remedy = f"free some space, or {_ELSEWHERE}" if error.errno in NO_SPACE else _ELSEWHERE
        raise UsageError("HC531", what, where=str(path), remedy=remedy) from None


def named_file(option: str, text: str) -> tuple[str, Path]:
    """Read `NAME=FILE.npy`. Names may hold `=`, so the file begins after the last one.

    Raises UsageError HC533.
    """
    name, _, path = text.rpartition("=")
    if not name or not path:
        raise UsageError("HC533", f"invalid input {text!r}", remedy=f"write {option} NAME=FILE.npy")
    return name, Path(path)


def named_value(text: str) -> tuple[str, Path | np.ndarray]:
    """Read `NAME=FILE.npy`, or `NAME=16000` and `NAME=1,2,3`: integers are int64, other numbers float32, true
    and false bool; `NAME=1,` is a list of one.

    Raises UsageError HC533.
    """
    import numpy as np

    name, _, given = text.rpartition("=")
    if not name or not given:
        remedy = "write --value NAME=16000, NAME=1,2,3 or NAME=FILE.npy"
        raise UsageError("HC533", f"invalid value {text!r}", remedy=remedy)
    words = given.removesuffix(",").split(",")
    kinds = (
        (r"[-+]?\d{1,18}", int, np.int64),
        (_DECIMAL, float, np.float32),
        (r"true|false", "true".__eq__, np.bool_),
    )
    for pattern, read, dtype in kinds:
        if all(re.fullmatch(pattern, word, re.ASCII) for word in words):
            read_words = [read(word) for word in words]
            return name, np.array(read_words if "," in given else read_words[0], dtype)
    return name, Path(given)


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


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with written_whole(path) as whole:
        whole.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """What a JSON file contains. Raises UsageError HC536 if it is not one."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        what = f"cannot read JSON: {error}"
        raise UsageError("HC536", what, where=str(path), remedy="give a file written by hybridc") from None


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


def print_json(data: Any, *, one_line: bool = False) -> None:
    """One JSON document on standard output; on one line for those who wait for it and cannot see its end."""
    print(json.dumps(data, indent=None if one_line else 2))


def measured_to_json(measured_us: Mapping[tuple[str, Device], float]) -> list[dict[str, Any]]:
    """Measured times of functions as plain JSON values."""
    return [
        {"function": function, "device": device.value, "us": us}
        for (function, device), us in measured_us.items()
    ]


def _check_exists(path: Path, what: str) -> None:
    if path.exists():
        return
    if not path.parent.is_dir():
        missing = f"{what} does not exist: there is no folder {path.parent}"
        raise UsageError("HC530", missing, where=str(path), remedy="check the path")
    close = difflib.get_close_matches(path.name, _names_in(path.parent), n=1)
    remedy = f"did you mean {path.with_name(close[0])}?" if close else "check the path"
    raise UsageError("HC530", f"{what} does not exist", where=str(path), remedy=remedy)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
