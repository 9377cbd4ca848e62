"""Files of a folder, each opened once: what is checked is what is used, whatever takes its name meanwhile."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_READ_BYTES = 1 << 20
_HASHED_BYTES = 1 << 16
"""At once: little, as the heap of a process that allocated more stays larger for good."""
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""No link is followed, and no FIFO waited for."""


class IrregularFileError(OSError):
    """A link, folder, FIFO, socket or device where a file should be."""


class OpenFile:
    """A regular file. Its handle is closed by `close`, or when it is collected."""

    def __init__(self, path: Path, folder: int | None = None) -> None:
        """Open `path`, or only its name in the folder of this handle. Raises OSError."""
        self.path = path
        """For messages."""
        name = path if folder is None else path.name
        try:
            handle = os.open(name, _FILE_FLAGS, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise _irregular(path) from None
            raise
        self._close = weakref.finalize(self, os.close, handle)
        self.handle = handle
        self._status = os.fstat(handle)
        if not stat.S_ISREG(self._status.st_mode):
            self._close()
            raise _irregular(path)

    @property
    def size_bytes(self) -> int:
        """When it was opened."""
        return self._status.st_size

    def read(self, most_bytes: int) -> bytes:
        """All of it. Raises OSError, also where it is longer than `most_bytes`."""
        parts, left = [], most_bytes
        for part in self._parts(_READ_BYTES):
            parts.append(part)
            left -= len(part)
            if left < 0:
                raise OSError(errno.EFBIG, f"longer than {most_bytes:,} bytes")
        return b"".join(parts)

    def copy(self, target: BinaryIO) -> str:
        """Write its bytes to another file; the hash of what was written. Raises OSError."""
        digest = hashlib.sha256()
        for part in self._parts(_HASHED_BYTES):
            digest.update(part)
            target.write(part)
        return digest.hexdigest()

    def sha256(self) -> str:
        """Of its bytes. Raises OSError."""
        digest = hashlib.sha256()
        for part in self._parts(_HASHED_BYTES):
            digest.update(part)
        return digest.hexdigest()

    def _parts(self, most_bytes: int) -> Iterator[bytes]:
        offset = 0
        while part := os.pread(self.handle, most_bytes, offset):
            yield part
            offset += len(part)

    def has_changed(self) -> bool:
        """Whether anybody wrote to it, or cut it, since it was opened; whatever its name stands for now."""
        now = os.fstat(self.handle)
        return (now.st_size, now.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns)

    def close(self) -> None:
        """Closing twice does no harm."""
        self._close()


class OpenFolder:
    """A folder, opened once: its files are found in it even if another takes its name."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._handle = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._handle)

    def open(self, name: str) -> OpenFile:
        """Raises OSError."""
        return OpenFile(self.path / name, self._handle)

    def is_replaced(self) -> bool:
        """Whether its path stands for something else now, or for nothing."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except OSError:
            return True

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_file(path: Path, most_bytes: int) -> bytes:
    """All of a regular file. Raises OSError, also where it is longer."""
    file = OpenFile(path)
    try:
        return file.read(most_bytes)
    finally:
        file.close()


def _irregular(path: Path) -> IrregularFileError:
    return IrregularFileError(errno.EINVAL, "a link, a folder or a device, not a file", str(path))
