"""g++, the CUDA headers and the cache of what was built with them."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybridc.caches import cache_path
from hybridc.errors import DeviceError
from hybridc.scratch import scratch_folder

NATIVE_FOLDER = Path(__file__).parent / "native"

_INSTALL_COMPILER = "install g++ 11 or newer"

BASE_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-w")


def cache_folder() -> Path:
    """Where built libraries are kept: the folder `emulator` of the user's cache.

    Raises DeviceError HC427 if the folder cannot be made.
    """
    folder = cache_path("emulator")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "set XDG_CACHE_HOME to a writable folder"
        raise DeviceError("HC427", f"cannot create the cache folder: {error}", remedy=remedy) from None
    return folder


@functools.cache
def _compiler() -> tuple[str, str]:
    """Path and version text of g++. Raises DeviceError HC421."""
    path = shutil.which("g++")
    if path is None:
        raise DeviceError(
            "HC421", "the emulated GPU requires g++, which is not installed", remedy=_INSTALL_COMPILER
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return path, version.partition("\n")[0]


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
    compiler, _ = _compiler()
    result = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
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
    file_name: str = "library.so",
) -> Path:
    """Build a shared library of C++ `sources` (texts), or find it in the cache.

    Every source is compiled by its own g++, as many at a time as there are processors. The cache key
    covers sources, flags, g++'s version, the headers' folder and the contents of `depends_on`. The
    library appears in its place complete, by a rename, so that two processes may build it at once.

    Raises DeviceError HC421 to HC423 and HC427.
    """
    include = cuda_include_folder()
    flags = (*BASE_FLAGS, *compile_flags, f"-I{NATIVE_FOLDER}", f"-I{include}")
    digest = hashlib.sha256()
    for text in (*sources, *flags, *link_flags, *map(str, link_files), _compiler()[1]):
        digest.update(text.encode() + b"\0")
    for path in depends_on:
        digest.update(path.read_bytes())
    target = cache_folder() / f"{name}-{digest.hexdigest()[:24]}" / file_name
    if target.is_file():
        return target
    with scratch_folder(f"{name}-building-", cache_folder()) as scratch:
        built = _compile_and_link(sources, scratch, name, flags, (*link_flags, *map(str, link_files)))
        target.parent.mkdir(exist_ok=True)
        os.replace(built, target)
    return target


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
