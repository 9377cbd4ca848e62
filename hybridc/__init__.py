"""hybridc: run ONNX models on a GPU too small for them, together with the CPU beside it.

    hybridc.compile("model.onnx", "model.hyb", target="cuda+avx2", gpu_memory="64MiB")
    session = hybridc.load("model.hyb")
    outputs = session.run(None, {"x": x})

Names are loaded on first use, so that `import hybridc` costs nothing and `hybridc.load` never loads the
compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridc.errors import HybridcError

if TYPE_CHECKING:
    import onnx

    from hybridc.compiler import Compiled, Planned
    from hybridc.options import CompileOptions
    from hybridc.runtime import Session

__version__ = "0.1.0"
__all__ = ["HybridcError", "compile", "load", "plan"]


def compile(
    model: str | Path | bytes | onnx.ModelProto,
    output: str | Path,
    *,
    target: str = "native",
    gpu_memory: str | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dims: Mapping[str, int] | None = None,
    machine: str | Path | None = None,
    threads: int | None = None,
    winograd: bool = True,
    tune_seconds: float | None = None,
    tune_record: str | Path | None = None,
) -> Compiled:
    """Compile an ONNX model to the folder `output`.

    `target` is `[cuda[:ARCH,...]+]ISA`, for example `cuda+avx2`. `gpu_memory` is the budget, bytes with a
    unit (`"64MiB"`) or a percentage of what the model needs entirely on the GPU (`"50%"`); without it there
    is no limit. `shapes` and `dims` fix what the model leaves open: input shapes by name, named dimensions.
    `machine` names a profile, or the file of one, whose speeds the planner weighs. `winograd=False` leaves
    out fast algorithms, whose rounding errors are a few times larger. `tune_seconds` is time to measure tiles
    of CPU kernels on this machine, `tune_record` a file of such measurements. Raises HybridcError.
    """
    from hybridc.compiler import compile_model

    options = replace(
        _options(target, gpu_memory, shapes, dims, machine, threads, winograd),
        tune_seconds=tune_seconds,
        tune_record=None if tune_record is None else Path(tune_record),
    )
    return compile_model(model, output, options)


def plan(
    model: str | Path | bytes | onnx.ModelProto,
    *,
    target: str = "cuda+avx2",
    gpu_memory: str | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dims: Mapping[str, int] | None = None,
    machine: str | Path | None = None,
) -> Planned:
    """Plan a model without compiling it; arguments as for `compile`. Needs no GPU. Raises HybridcError."""
    from hybridc.compiler import plan_model

    return plan_model(model, _options(target, gpu_memory, shapes, dims, machine, None))


def load(path: str | Path, *, threads: int | None = None) -> Session:
    """Load a compiled artifact; `threads` overrides how many cores it uses. Raises HybridcError."""
    from hybridc.runtime import load as load_session

    return load_session(path, threads=threads)


def _options(
    target: str,
    gpu_memory: str | None,
    shapes: Mapping[str, tuple[int, ...]] | None,
    dims: Mapping[str, int] | None,
    machine: str | Path | None,
    threads: int | None,
    winograd: bool = True,
) -> CompileOptions:
    from hybridc.machine import load_machine
    from hybridc.options import CompileOptions, parse_budget
    from hybridc.targets import parse_target

    return CompileOptions(
        target=parse_target(target),
        gpu_memory=None if gpu_memory is None else parse_budget(gpu_memory),
        shapes=tuple(
            (name, tuple(s) if isinstance(s, list) else s) for name, s in dict(shapes or {}).items()
        ),
        dims=tuple(dict(dims or {}).items()),
        machine=load_machine() if machine is None else load_machine(machine),
        threads=threads,
        winograd=winograd,
    )
