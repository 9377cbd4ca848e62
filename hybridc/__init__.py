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
    pins: Mapping[str, str] | None = None,
    plan_seconds: float = 10.0,
    host_memory: str | None = None,
    threads: int | None = None,
    winograd: bool = True,
    tune_seconds: float | None = None,
    tune_record: str | Path | None = None,
    profile_kernels: bool = False,
) -> Compiled:
    """Compile an ONNX model to the folder `output`.

    `target` is `[cuda[:ARCH,...]+]ISA`, for example `cuda+avx2`. `gpu_memory` is the budget, bytes with a
    unit (`"64MiB"`) or a percentage of what the model needs entirely on the GPU (`"50%"`); without it there
    is no limit. With several, `"256MiB,1GiB"`, the artifact has a plan for each. `host_memory` limits what a
    run may hold of the host's memory. `shapes` and `dims` fix what the model leaves open: input shapes by
    name, named dimensions. `machine` names a profile, or the file of one, whose speeds the planner weighs.
    `pins` fixes where nodes run, `{"encoder/*": "gpu"}`; `plan_seconds` is the effort to search for a plan.
    `winograd=False` leaves out fast algorithms, whose rounding errors are a few times larger. `tune_seconds`
    is time to measure tiles of CPU kernels on this machine, `tune_record` a file of such measurements. With
    `profile_kernels` the planner takes times of the kernels that are measured on this machine, instead of
    predictions. Raises HybridcError.
    """
    from hybridc.compiler import compile_model
    from hybridc.options import parse_bytes

    options = replace(
        _options(target, gpu_memory, shapes, dims, machine, pins, plan_seconds),
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
        threads=threads,
        winograd=winograd,
        tune_seconds=tune_seconds,
        tune_record=None if tune_record is None else Path(tune_record),
        profile_kernels=profile_kernels,
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
    pins: Mapping[str, str] | None = None,
    plan_seconds: float = 10.0,
) -> Planned:
    """Plan a model without compiling it; arguments as for `compile`. Needs no GPU. Raises HybridcError."""
    from hybridc.compiler import plan_model

    return plan_model(model, _options(target, gpu_memory, shapes, dims, machine, pins, plan_seconds))


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    gpu_memory: str | None = None,
    host_memory: str | None = None,
) -> Session:
    """Load a compiled artifact; `threads` overrides how many cores it uses. Raises HybridcError.

    Of several plans the one of the largest budget that fits the GPU's free memory is taken, or that of the
    largest budget of at most `gpu_memory` (`"1GiB"`). `host_memory` overrides what the artifact was compiled
    with.
    """
    from hybridc.options import parse_bytes
    from hybridc.runtime import load as load_session

    return load_session(
        path,
        threads=threads,
        gpu_memory_bytes=None if gpu_memory is None else parse_bytes(gpu_memory),
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
    )


def _options(
    target: str,
    gpu_memory: str | None,
    shapes: Mapping[str, tuple[int, ...]] | None,
    dims: Mapping[str, int] | None,
    machine: str | Path | None,
    pins: Mapping[str, str] | None,
    plan_seconds: float,
) -> CompileOptions:
    from hybridc.machine import load_machine
    from hybridc.options import CompileOptions, parse_budgets, parse_pin
    from hybridc.targets import parse_target

    return CompileOptions(
        target=parse_target(target),
        gpu_memory=() if gpu_memory is None else parse_budgets(gpu_memory),
        shapes=tuple(
            (name, tuple(s) if isinstance(s, list) else s) for name, s in dict(shapes or {}).items()
        ),
        dims=tuple(dict(dims or {}).items()),
        machine=load_machine() if machine is None else load_machine(machine),
        pins=tuple(parse_pin(f"{name}={device}") for name, device in dict(pins or {}).items()),
        plan_seconds=plan_seconds,
    )
