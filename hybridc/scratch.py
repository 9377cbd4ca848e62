"""Folders for half-done work, which go away however a process ends: another removes those of killed ones.

The process that uses such a folder holds a lock on it, which the system releases when the process ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".partial"
_open: set[Path] = set()


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A fresh folder in `parent`, or where temporary files go; removed at the end, if it is still there.

    Those of the same prefix that killed processes left there are removed first. Raises OSError if it cannot
    be made.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_abandoned(prefix, parent)
    folder, handle = _locked_folder(prefix, parent)
    _open.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _open.discard(folder)
        os.close(handle)


def remove_scratch_folders() -> None:
    """Remove every folder now in use: for a process that ends before its blocks can."""
    for folder in tuple(_open):
        shutil.rmtree(folder, ignore_errors=True)


def _locked_folder(prefix: str, parent: Path) -> tuple[Path, int]:
    """A fresh folder, and the handle whose closing gives up the lock on it."""
    while True:
        folder = Path(tempfile.mkdtemp(SUFFIX, prefix, parent))
        # another process may take it for abandoned before it is locked
        with suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with suppress(OSError):  # some file systems have no locks: there nobody removes those of others
                fcntl.flock(handle, fcntl.LOCK_EX)
            if folder.exists():
                return folder, handle
            os.close(handle)


def _remove_abandoned(prefix: str, parent: Path) -> None:
    """Those that no living process holds a lock on, or could have made."""
    name = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}" + re.escape(SUFFIX))
    with suppress(OSError):
        for path in [entry for entry in parent.iterdir() if name.fullmatch(entry.name)]:
            _remove_if_abandoned(path)


def _remove_if_abandoned(folder: Path) -> None:
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(handle).st_uid != os.geteuid():
                return
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError where somebody holds it
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)
