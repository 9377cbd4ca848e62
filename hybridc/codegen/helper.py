"""The runtime's C++ helper, which each artifact's library has: compiled once for a compiler and its headers.

Like all that g++ makes of hybridc's own sources it is kept whatever becomes of models: it is no part of the
cache of compilations, and `HYBRIDC_CACHE_SIZE` says nothing about it.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

from tvm_ffi import libinfo

from hybridc.caches import FileCache, cache_path, key_of
from hybridc.codegen.gxx import run_gxx
from hybridc.scratch import scratch_folder

HELPER_SOURCE = Path(__file__).parent.parent / "runtime" / "native" / "helper.cc"
_OPTIONS = ("-c", "-O2", "-std=c++20", "-pthread", "-fPIC", "-fvisibility=hidden")


@functools.cache
def helper_object() -> bytes:
    """The object file. A process asks once.

    The key in the cache covers the compiler, its options, and the contents of the sources and of all headers
    beside them and in the folders of tvm_ffi. Raises DeviceError HC403 without g++, InternalError HC912 where
    it fails.
    """
    folders = (Path(libinfo.find_include_path()), Path(libinfo.find_dlpack_include_path()))
    # headers name their files in messages: an artifact has no path of this computer
    named = (*((folder, "tvm_ffi") for folder in folders), (HELPER_SOURCE.parent, "hybridc"))
    options = (
        *_OPTIONS,
        *(f"-ffile-prefix-map={folder}={name}" for folder, name in named),
        *(f"-I{folder}" for folder in folders),
    )
    version = run_gxx("--version")
    headers = (path.read_bytes() for folder, _ in named for path in sorted(folder.rglob("*.h")))
    content = key_of(str(shutil.which("g++")), version, *options, HELPER_SOURCE.read_bytes(), *headers)
    cache, key = FileCache(cache_path("native")), f"helper-{content[:24]}.o"
    found = cache.get(key)
    if found is None:
        found = _compiled(options)
        cache.put(key, found)
    return found


def _compiled(options: tuple[str, ...]) -> bytes:
    with scratch_folder("hybridc-helper-") as folder:
        path = folder / "helper.o"
        run_gxx(*options, str(HELPER_SOURCE), "-o", str(path))
        return path.read_bytes()
