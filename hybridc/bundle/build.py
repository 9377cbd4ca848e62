"""The runtime of bundles, compiled by g++: libhybridc_runtime.so and the runner. Kept in the user's cache."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tvm_ffi import libinfo

from hybridc.caches import FileCache, cache_path, key_of
from hybridc.errors import DeviceError, InternalError
from hybridc.native import can_build
from hybridc.scratch import scratch_folder

NATIVE_FOLDER = Path(__file__).parent / "native"
HEADER = NATIVE_FOLDER / "hybridc.h"
RUNTIME = "libhybridc_runtime.so"
RUNNER = "run"
_LINK_FLAGS = ("-s", "-pthread", "-Wl,--build-id=none", "-Wl,--enable-new-dtags")
"""Found by RUNPATH, which comes behind LD_LIBRARY_PATH, so that a program may bring libraries of its own."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Contents of two files."""

    library: bytes
    runner: bytes


def build_runtime(tvm_ffi_version: str) -> Runtime:
    """Compile both, unless they are in the cache. No path of this computer is in them.

    Raises DeviceError HC403 without g++, InternalError HC912 where it fails.
    """
    if not can_build():
        raise DeviceError("HC403", "g++ was not found", remedy="install g++ (Debian: apt-get install g++)")
    includes = (libinfo.find_include_path(), libinfo.find_dlpack_include_path())
    flags = (
        *("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden"),
        *(f"-ffile-prefix-map={path}=tvm_ffi" for path in includes),
        f"-ffile-prefix-map={NATIVE_FOLDER}=hybridc",
        f"-I{NATIVE_FOLDER}",
        *(option for path in includes for option in ("-isystem", path)),
        f'-DHYBRIDC_TVM_FFI_VERSION="{tvm_ffi_version}"',
    )
    files = sorted(path for path in NATIVE_FOLDER.rglob("*") if path.is_file())
    sources = {str(path.relative_to(NATIVE_FOLDER)): path.read_bytes() for path in files}
    texts = [part for name, content in sources.items() for part in (name, content.decode())]
    digest = key_of(_gxx("--version"), *flags, *_LINK_FLAGS, *texts)
    cache = FileCache(cache_path("native"))
    keys = [f"{name}-{digest[:24]}" for name in (RUNTIME, RUNNER)]
    library, runner = (cache.get(key) for key in keys)
    if library is None or runner is None:
        with scratch_folder("hybridc-bundle-building-") as folder:
            library, runner = (path.read_bytes() for path in _build(list(sources), flags, folder))
        for key, content in zip(keys, (library, runner), strict=True):
            cache.put(key, content)
    return Runtime(library, runner)


def compiler_library(name: str) -> Path:
    """A shared library of g++'s, such as libstdc++.so.6, which programs that it links need."""
    return Path(_gxx(f"-print-file-name={name}").strip()).resolve()


def _build(names: Sequence[str], flags: Sequence[str], folder: Path) -> tuple[Path, Path]:
    """Compile each of the two as one file, as most of the time goes into headers, and link them."""
    sources = [name for name in names if name.endswith(".cc")]
    own = [name for name in sources if name.startswith("runner/")]
    parts = {RUNTIME: [name for name in sources if name not in own], RUNNER: own}

    def compile_one(part: str) -> str:
        source, made = folder / f"all_of_{part}.cc", folder / f"{part}.o"
        source.write_text("".join(f'#include "{name}"\n' for name in parts[part]))
        _gxx(*flags, "-c", str(source), "-o", str(made))
        return str(made)

    with ThreadPoolExecutor(len(parts)) as pool:
        objects = dict(zip(parts, pool.map(compile_one, parts), strict=True))
    library, runner = folder / RUNTIME, folder / RUNNER
    exports = f"-Wl,--version-script={NATIVE_FOLDER / 'exports.map'}"
    named = ("-shared", f"-Wl,-soname,{RUNTIME}", "-Wl,-rpath,$ORIGIN", exports)
    _gxx(*_LINK_FLAGS, *named, objects[RUNTIME], libinfo.find_libtvm_ffi(), "-ldl", "-o", str(library))
    places = ("-Wl,-rpath,$ORIGIN/lib", "-Wl,--allow-shlib-undefined")
    _gxx(*_LINK_FLAGS, *places, objects[RUNNER], str(library), "-o", str(runner))
    return library, runner


def _gxx(*arguments: str) -> str:
    """What g++ prints."""
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        what = "g++ failed to build the runtime of bundles"
        raise InternalError("HC912", what, where=done.stderr.strip()[-2000:])
    return done.stdout
