"""Small C++ libraries of the compiler itself, built by g++ on first use and kept between processes.

They make searches faster and nothing else: whoever uses one has a way without it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
from pathlib import Path

from hybridc.caches import cache_path
from hybridc.scratch import scratch_folder

FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off")
"""No contraction to FMA, so that arithmetic agrees with Python's to the last bit; and no -march, since
several machines may share the cache through one home folder."""

_log = logging.getLogger(__name__)


@functools.cache
def build_library(source: Path, name: str) -> ctypes.CDLL | None:
    """The library of one C++ file, which includes only the standard library's headers and those beside it.

    None where it cannot be built: no g++, one that refuses the source, or no folder to write to. The
    library lies in the folder `native` of the user's cache; the name of its file has a hash of sources, flags
    and compiler. It appears there complete, by a rename, so that two processes may build it at once.
    Functions to be called need C linkage and default visibility.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        _log.info("g++ not found: %s runs as slower Python code", name)
        return None
    try:
        return ctypes.CDLL(str(_built(compiler, source, name)))
    except (OSError, subprocess.CalledProcessError) as error:
        _log.info("%s runs as slower Python code: %s", name, getattr(error, "stderr", None) or error)
        return None


def _built(compiler: str, source: Path, name: str) -> Path:
    """Path of the library, compiled now unless it is in the cache."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\0".join((compiler, version, *FLAGS)).encode())
    for path in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(b"\0" + path.read_bytes())
    target = _cache_folder() / f"{name}-{digest.hexdigest()[:24]}.so"
    if not target.is_file():
        with scratch_folder(f"{name}-building-", target.parent) as scratch:
            built = scratch / "built.so"
            command = [compiler, *FLAGS, str(source), "-o", str(built)]
            subprocess.run(command, capture_output=True, text=True, check=True)
            os.replace(built, target)
    return target


def _cache_folder() -> Path:
    """Made if it is not there. Raises OSError if it cannot be."""
    folder = cache_path("native")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
