"""Where hybridc keeps files between processes, and a cache whose every entry is checked before it is used."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

_log = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_UNFINISHED = ".unfinished-"


def cache_path(name: str) -> Path:
    """A file or folder in the user's cache: on Linux in `$XDG_CACHE_HOME/hybridc` or `~/.cache/hybridc`."""
    return user_cache_path("hybridc", appauthor=False) / name


def key_of(*parts: str | bytes) -> str:
    """64 hexadecimal digits that stand for these parts in this order."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class FileCache:
    """Bytes by key, a file of `folder` for each, which threads and processes may share.

    An entry is used only if it and the folder belong to this user, nobody else may write to them, and the
    entry is as it was put: behind its bytes stands a SHA-256 of key and bytes. Anything else counts as
    missing, and so does everything where the folder cannot be read; where it cannot be written, nothing is
    kept. No method raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> bytes | None:
        """What was put under a key. The entry counts as used now."""
        path = self.folder / key
        try:
            if not _is_own(os.lstat(self.folder), stat.S_ISDIR):
                return None
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(handle, "rb") as stream:
                if not _is_own(os.fstat(handle), stat.S_ISREG):
                    return None
                data = stream.read()
            value = data[:-_DIGEST_BYTES]
            if data[-_DIGEST_BYTES:] != _checksum(key, value):
                return None
        except (OSError, MemoryError):
            return None
        with suppress(OSError):  # a folder that cannot be written
            os.utime(path)
        return value

    def find(self, key: str) -> Path | None:
        """The file of an entry, for who has to open it by its path, as a loader does: what `get` returns with
        a checksum behind it, which loaders of ELF files ignore."""
        return None if self.get(key) is None else self.folder / key

    def put(self, key: str, value: bytes) -> None:
        """Keep bytes, in place of an older entry. The file appears complete, by a rename."""
        try:
            if not self._make_folder():
                return
            handle, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=self.folder)  # of mode 0600
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(value)
                    stream.write(_checksum(key, value))
                os.replace(name, self.folder / key)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            _log.info("nothing is kept in %s: %s", self.folder, error)

    def trim(self, limit_bytes: int) -> None:
        """Remove what was not used for longest, until the files together have at most `limit_bytes`.

        An entry that another process is about to read is missing to it then; what it has open it keeps.
        """
        try:
            with os.scandir(self.folder) as entries:
                files = [(e.stat(follow_symlinks=False), e.path) for e in entries if e.is_file()]
        except OSError:
            return
        held_bytes = sum(status.st_size for status, _ in files)
        for status, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
            if held_bytes <= limit_bytes:
                break
            with suppress(OSError):
                os.unlink(path)
                held_bytes -= status.st_size

    def _make_folder(self) -> bool:
        """Make the folder if there is none; False if others may have put there what they like."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(self.folder, 0o700)
        return _is_own(os.lstat(self.folder), stat.S_ISDIR)


def _is_own(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Whether this is of a kind, belongs to this user, and may be written to by nobody else."""
    own = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_MAY_WRITE
    return own and is_kind(status.st_mode)


def _checksum(key: str, value: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(value)
    return digest.digest()
