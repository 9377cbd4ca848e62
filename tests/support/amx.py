"""AMX instructions for tests: the processor's own, or those that `amx_trap.cpp` executes in their place."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from hybridc.artifact import load
from hybridc.native import build_library
from hybridc.runtime import code
from hybridc.runtime.tiles import enable_amx
from hybridc.targets import ISAS, Isa, cpu_flags, missing_flags

_SOURCE = Path(__file__).with_name("amx_trap.cpp")


@contextmanager
def executing(name: str) -> Iterator[Isa]:
    """An instruction set that code made meanwhile may use in this process, in all of its threads.

    AMX instructions are trapped where the processor has all else that AMX's target needs; artifacts for it
    are then taken as well. Skips the test where more is missing, fails it where tiles were not released.
    """
    isa = ISAS[name]
    missing = set(missing_flags(isa))
    if missing - _tile_flags():
        pytest.skip(f"this processor lacks {', '.join(sorted(missing - _tile_flags()))}")
    if not missing:
        enable_amx(isa.cpu_flags)
        yield isa
        return
    trap = _library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "cpu_flags", lambda: cpu_flags() | _tile_flags())
        patch.setattr(code, "enable_amx", lambda flags: None)
        assert trap.amx_trap_install() == 0
        open_before = trap.amx_trap_configurations() - trap.amx_trap_releases()
        try:
            yield isa
        finally:
            assert trap.amx_trap_remove() == 0
        assert trap.amx_trap_configurations() - trap.amx_trap_releases() == open_before


def tiles_here() -> str:
    """The instruction set that shows most about tiles: AMX if this processor has at least all else."""
    return "amx_emulated" if set(missing_flags(ISAS["amx"])) - _tile_flags() else "amx"


def _tile_flags() -> frozenset[str]:
    """Of AMX itself."""
    return frozenset(ISAS["amx"].cpu_flags) - frozenset(ISAS["avx512_bf16"].cpu_flags)


@cache
def _library() -> ctypes.CDLL:
    library = build_library(_SOURCE, "amx_trap")
    if library is None:
        pytest.skip("instructions are trapped by a library that g++ makes")
    for count in ("configurations", "releases"):
        getattr(library, f"amx_trap_{count}").restype = ctypes.c_long
    return library
