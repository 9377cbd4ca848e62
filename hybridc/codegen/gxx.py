"""g++, as artifacts' libraries need it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess

from hybridc.errors import DeviceError, InternalError


def check_compiler() -> None:
    """Raise DeviceError HC403 without g++."""
    if shutil.which("g++") is None:
        raise DeviceError("HC403", "g++ was not found", remedy="install g++ (Debian: apt-get install g++)")


def run_gxx(*arguments: str) -> str:
    """What g++ prints. Raises DeviceError HC403 without it, InternalError HC912 where it fails, OSError where
    the disk is full."""
    check_compiler()
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, env=environment)
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode != 0:
        raise InternalError(
            "HC912", "g++ failed to build the artifact's library", where=done.stderr.strip()[-2000:]
        )
    return done.stdout
