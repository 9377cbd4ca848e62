"""Small C++ libraries of the compiler itself, built by g++ on first use and kept between processes.

They make searches faster and nothing else: whoever uses one has a way without it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import shutil
import subprocess
from pathlib import Path

from hybridc.caches import FileCache, cache_path, key_of
from hybridc.scratch import scratch_folder

FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off")
"""No contraction to FMA, so that arithmetic agrees with Python's to the last bit; and no -march, since
several machines may share the cache through one home folder."""

_log = logging.getLogger(__name__)


def can_build() -> bool:
    """Whether there is a compiler to build libraries with."""
    return shutil.which("g++") is not None


@functools.cache
def build_library(source: Path, name: str) -> ctypes.CDLL | None:
    """The library of one C++ file, which includes only the standard library's headers and those beside it.

    None where it cannot be built: no g++, one that refuses the source, or no folder to write to. The
    library lies in the folder `native` of the user's cache, whose `FileCache` checks what is found; the name
    of its file has a hash of sources, flags and compiler. Two processes may build it at once.
    Functions to be called need C linkage and default visibility.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        _log.info("g++ not found: %s runs as slower Python code", name)
        return None
    try:
        path = _built(compiler, source, name)
        return None if path is None else ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        _log.info("%s runs as slower Python code: %s", name, getattr(error, "stderr", None) or error)
        return None


def _built(compiler: str, source: Path, name: str) -> Path | None:
    """Path of the library, compiled now unless it is in the cache; None where nothing can be kept there."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    sources = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = f"{name}-{key_of(compiler, version, *FLAGS, *sources)[:24]}.so"
    cache = FileCache(cache_path("native"))
    found = cache.find(key)
    if found is None:
        with scratch_folder(f"{name}-building-") as scratch:
            built = scratch / "built.so"
            command = [compiler, *FLAGS, str(source), "-o", str(built)]
            subprocess.run(command, capture_output=True, text=True, check=True)
            cache.put(key, built.read_bytes())
        found = cache.find(key)
    return found
