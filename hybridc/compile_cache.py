"""What the compiler keeps between runs: results of its slow parts, by everything that they depend on.

A part names what it reads, and `remembered` finds what it made of that before: the schedule of a function,
the object of a kernel, the plan of a graph. A compilation makes the same artifact with the cache and without.
"""

from __future__ import annotations

import functools
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Protocol, TypeVar, cast

from hybridc.caches import FileCache, cache_path, key_of
from hybridc.errors import UsageError
from hybridc.options import parse_bytes

T = TypeVar("T")

SIZE_VARIABLE = "HYBRIDC_CACHE_SIZE"
DEFAULT_SIZE = "1GiB"
"""What a hundred large networks leave: some MB each, most of it code for GPUs."""
_PACKAGES = (
    "apache-tvm",
    "apache-tvm-ffi",
    "cuda-bindings",
    "highspy",
    "numpy",
    "nvidia-cuda-cccl",
    "nvidia-cuda-crt",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-nvfatbin",
    "nvidia-nvjitlink",
    "ortools",
)
"""Whose versions decide what the compiler makes of a program; some need not be installed."""
_SOURCES = frozenset({".py", ".cpp", ".cc", ".h"})


class Cache(Protocol):
    """Bytes by key. A key stands for everything that the bytes were made of."""

    def get(self, key: str) -> bytes | None:
        """What was put under a key, or None."""

    def put(self, key: str, value: bytes) -> None:
        """Keep bytes for later processes, if that is possible."""


class NoCache:
    """Keeps nothing."""

    def get(self, key: str) -> None:
        return None

    def put(self, key: str, value: bytes) -> None:
        pass


@contextmanager
def compile_cache(use: bool) -> Iterator[Cache]:
    """The user's cache of a compilation, trimmed to its size at the end; one that keeps nothing unless `use`.

    `HYBRIDC_CACHE_SIZE` says how large it may be, `0B` is none at all. Raises UsageError HC510 if that is no
    amount of memory.
    """
    limit_bytes = _size_bytes() if use else 0
    if not limit_bytes:
        yield NoCache()
        return
    cache = FileCache(cache_path("compiled"))
    try:
        yield cache
    finally:
        cache.trim(limit_bytes)


def remembered(cache: Cache, compute: Callable[[], T], parts: Iterable[str | bytes]) -> T:
    """What `compute` returns, or what it returned when the cache was last asked with the same parts.

    Requires: `parts` name the computation and say everything that it depends on, besides the code of hybridc
    and its packages; the result can be pickled. To write them takes long: a generator does not where nothing
    is kept.
    """
    if isinstance(cache, NoCache):
        return compute()
    key = program_key(*parts)
    stored = cache.get(key)
    if stored is not None:
        # as trustworthy as this code: FileCache reads nothing that another user could have written
        return cast(T, pickle.loads(zlib.decompress(stored)))
    value = compute()
    cache.put(key, zlib.compress(pickle.dumps(value), 1))
    return value


def content_of(value: object) -> str:
    """All that a value of dataclasses and collections says; its `repr` may be a summary for people."""
    if is_dataclass(value):
        inside = (f"{field.name}={content_of(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({', '.join(inside)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{content_of(k)}: {content_of(v)}' for k, v in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(content_of, value))})"
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted(map(content_of, value)))}}}"
    return repr(value)


def program_key(*parts: str | bytes) -> str:
    """A key of these parts and of the program that works on them: hybridc and the packages it is made of."""
    return key_of(_installation(), *parts)


def _size_bytes() -> int:
    text = os.environ.get(SIZE_VARIABLE) or DEFAULT_SIZE
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise UsageError(error.code, error.what, where=f"${SIZE_VARIABLE}", remedy=error.remedy) from None


@functools.cache
def _installation() -> str:
    """Stands for all code that takes part: our own files, and the lists of packages' files with their hashes.

    All of our own, although a kernel's object depends on few of them: a wrong key would mean wrong code.
    """
    root = Path(__file__).parent
    files = sorted(
        Path(folder) / name
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if Path(name).suffix in _SOURCES
    )
    own = (part for path in files for part in (str(path.relative_to(root)), path.read_bytes()))
    return key_of(*own, *map(_package, _PACKAGES))


def _package(name: str) -> str:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return f"no {name}"
    return f"{name} {found.version}\n{found.read_text('RECORD') or ''}"
