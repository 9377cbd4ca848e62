"""g++, the CUDA headers and the cache of what was built with them."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybridc.caches import FileCache, cache_path, key_of
from hybridc.errors import DeviceError
from hybridc.scratch import scratch_folder

NATIVE_FOLDER = Path(__file__).parent / "native"

_INSTALL_COMPILER = "install g++ 11 or newer"

BASE_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-w")


CACHE_BYTES = 1 << 30
"""What the cache may hold: some hundred times the kernels of a large network."""


def cache_folder() -> Path:
    """Where built libraries are kept: the folder `emulator` of the user's cache.

    Raises DeviceError HC427 if the folder cannot be made.
    """
    folder = cache_path("emulator")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _no_folder(f"cannot create the cache folder: {error}") from None
    return folder


def _no_folder(what: str) -> DeviceError:
    remedy = "set XDG_CACHE_HOME to a folder of your own that nobody else may write to, with some space"
    return DeviceError("HC427", what, remedy=remedy)


@functools.cache
def _compiler() -> str:
    """Path of g++. Raises DeviceError HC421."""
    path = shutil.which("g++")
    if path is None:
        raise DeviceError(
            "HC421", "the emulated GPU requires g++, which is not installed", remedy=_INSTALL_COMPILER
        )
    return path


@functools.cache
def cuda_include_folder() -> Path:
    """The folder of cuda.h: from NVIDIA's wheels, else from a CUDA toolkit. Raises DeviceError HC422."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(location) / "cu13" for location in (spec.submodule_search_locations or ())] if spec else []
    roots += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for root in roots:
        if (root / "include" / "cuda.h").is_file() and (root / "include" / "crt").is_dir():
            return root / "include"
    raise DeviceError(
        "HC422",
        "the emulated GPU requires the CUDA headers, which are not installed",
        remedy="pip install hybridc[cuda]",
    )


def _run_compiler(arguments: Sequence[str], subject: str) -> None:
    result = subprocess.run([_compiler(), *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line or "undefined" in line]
        raise DeviceError(
            "HC423",
            f"g++ cannot compile {subject} for the emulated GPU",
            where="\n      ".join(errors[:5]) or result.stderr[-500:],
            remedy=f"{_INSTALL_COMPILER}; if it is, the kernel uses a CUDA feature that the emulator does"
            " not support",
        )


def build_library(
    sources: Sequence[str],
    *,
    name: str,
    compile_flags: Sequence[str] = (),
    link_flags: Sequence[str] = (),
    link_files: Sequence[Path] = (),
    depends_on: Sequence[Path] = (),
) -> Path:
    """Build a shared library of C++ `sources` (texts), or find it in the cache, which needs no g++.

    Every source is compiled by its own g++, as many at a time as there are processors. The key in the cache
    covers sources, flags, the headers' folder, the contents of `depends_on`, and the C library, since
    machines may share a home folder. `FileCache` checks what is found; two processes may build at once.

    Raises DeviceError HC421 to HC423 and HC427.
    """
    include = cuda_include_folder()
    flags = (*BASE_FLAGS, *compile_flags, f"-I{NATIVE_FOLDER}", f"-I{include}")
    files = [path.read_bytes() for path in (*depends_on, *link_files)]
    key = f"{name}-{key_of(*sources, *flags, *link_flags, *platform.libc_ver(), *files)}.so"
    cache = FileCache(cache_folder())
    found = cache.find(key)
    if found is None:
        try:
            with scratch_folder(f"{name}-building-") as scratch:
                built = _compile_and_link(sources, scratch, name, flags, (*link_flags, *map(str, link_files)))
                cache.put(key, built.read_bytes())
        except OSError as error:
            raise _no_folder(f"cannot build a library for the emulated GPU: {error}") from None
        found = cache.find(key)
        cache.trim(CACHE_BYTES)
    if found is None:
        raise _no_folder(f"nothing can be kept in {cache.folder}: {_why_not(cache.folder)}")
    return found


def _why_not(folder: Path) -> str:
    status = folder.stat()
    if status.st_uid != os.geteuid():
        return "it belongs to another user"
    return "others may write to it" if status.st_mode & 0o022 else "the disk may be full"


def _compile_and_link(
    sources: Sequence[str], scratch: Path, name: str, flags: Sequence[str], link_flags: Sequence[str]
) -> Path:
    def compile_one(numbered: tuple[int, str]) -> str:
        number, text = numbered
        source = scratch / f"{number}.cpp"
        source.write_text(text)
        _run_compiler([*flags, "-c", str(source), "-o", str(source.with_suffix(".o"))], name)
        return str(source.with_suffix(".o"))

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, enumerate(sources)))
    built = scratch / "built.so"
    _run_compiler(["-shared", *objects, "-o", str(built), *link_flags], name)
    return built
