"""Arrays with a header in one file: a zip archive of .npy files as NumPy writes them, replaced whole."""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridc.files import OpenFile

_HEADER = "header"


def write_arrays(path: Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write a file in the place of `path`: at any moment, even of a power failure, one is whole.

    Names of arrays are names of files of an archive. Raises OSError.
    """
    _remove_abandoned(path)
    content = {_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays}
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, allow_pickle=False, **content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(path.parent)


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """A file of arrays that is open."""

    header: Any
    """JSON, of which nothing was checked."""
    _archive: zipfile.ZipFile

    def array(self, name: str) -> np.ndarray:
        """An array, which was stored as it is: nothing is larger in memory than in the file.

        Raises what zipfile and NumPy raise; zipfile compares the CRC of what was read to the end.
        """
        return _array(self._archive, name)


@contextmanager
def open_arrays(path: Path) -> Iterator[ArrayFile]:
    """A regular file that `write_arrays` wrote. Raises OSError, and what zipfile, json and NumPy raise."""
    file = OpenFile(path)
    with open(file.handle, "rb", closefd=False) as stream, zipfile.ZipFile(stream) as archive:
        yield ArrayFile(json.loads(_array(archive, _HEADER).tobytes()), archive)


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    entry = archive.getinfo(f"{name}.npy")
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise ValueError(f"{name} is compressed")
    with archive.open(entry) as stream:
        content = stream.read()
    return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)


def _remove_abandoned(path: Path) -> None:
    """Half-written files of a process that was killed."""
    for each in path.parent.glob(f".{path.name}-*"):
        with suppress(OSError):
            each.unlink()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
