"""Folders for half-done work, known to the process so that they can be removed however it ends."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_open: set[Path] = set()


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A fresh folder in `parent`, or where temporary files go; removed at the end, if it is still there.

    Raises OSError if it cannot be made.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    _open.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _open.discard(folder)


def remove_scratch_folders() -> None:
    """Remove every folder now in use: for a process that ends before its blocks can."""
    for folder in tuple(_open):
        shutil.rmtree(folder, ignore_errors=True)
