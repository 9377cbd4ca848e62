"""Kernels for tensor cores on the emulated GPU, in a way and with a source that a test may choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
import tvm

from hybridc import emulator
from hybridc.codegen.cuda_callback import cuda_compiler
from hybridc.codegen.cuda_functions import corrected, printable
from hybridc.schedules.cuda.core.launch import cuda_target
from hybridc.schedules.cuda.tensor_core import tensor_core
from hybridc.schedules.cuda.tensor_core.tile import Way
from hybridc.schedules.rule import Scheduled
from hybridc.targets import parse_target
from tests.support.emulated import compile_for_emulator

TARGET = parse_target("cuda:sm_80,sm_90+avx2")


def unedited(source: str) -> str:
    return source


@contextmanager
def computed(way: Way | None) -> Iterator[None]:
    """Products are computed in this way, or in the best one."""
    with pytest.MonkeyPatch.context() as patch:
        if way is not None:
            patch.setattr(tensor_core, "overlapping_way", lambda *sizes: way)
            patch.setattr(tensor_core, "fastest_way", lambda *sizes, **options: (way, 1.0))
        yield


def names_to_run(request: pytest.FixtureRequest, test: Callable[..., None]) -> set[str]:
    """Of the cases of a test in this run, by its parameter `name`."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return {str(item.callspec.params["name"]) for item in items if item.function is test}


def built(
    scheduled: Mapping[str, Scheduled], edit: Callable[[str], str] = unedited
) -> tuple[tvm.runtime.Module, str]:
    """A library of functions for the emulated GPU, and its source as `edit` leaves it."""
    sources: list[str] = []

    def compile_edited(source: str) -> bytes:
        sources.append(edit(corrected(str(source))))
        return compile_for_emulator(sources[0])

    emulator.start(1 << 30)
    with cuda_compiler(compile_edited):
        named = {name: s.function.with_attr("global_symbol", name) for name, s in scheduled.items()}
        module = tvm.IRModule(printable(named))
        library = tvm.compile(module, target=tvm.target.Target(cuda_target(TARGET), host="llvm"))
    return library, sources[0]
