"""The whole story: an ONNX model and a GPU memory budget in, an artifact out.

read_model    check the file, simplify it, import it to Relax with the origin of every binding
run_stages    canonicalize, fuse, schedule, plan within the budget, verify, lower (passes/pipeline.py)
build_library CPU code, CUDA fatbin, VM bytecode and the runtime's helper in one shared library
store         model.hyb: manifest, plan, library, CUDA source, weights
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hybridc.artifact.manifest import Port, Source
from hybridc.artifact.store import Contents, check_destination, store
from hybridc.calibrate.profile import profiler_of
from hybridc.calibrate.rounding import rounding_errors_of
from hybridc.codegen.cuda import check_architectures, compile_fatbin
from hybridc.codegen.library import BuiltLibrary, build_library, check_compiler
from hybridc.emulator import image_key, preload
from hybridc.errors import PlanError
from hybridc.frontend import ImportedModel, ValueInfo, read_model
from hybridc.ir import Copy, Device, Graph, Plan, Role
from hybridc.machine import Machine
from hybridc.options import CompileOptions, check_bound_seconds, format_budget, missing_output
from hybridc.passes.partition import Effort, smallest_budget_bytes, smallest_bytes_bound
from hybridc.passes.pins import Pins
from hybridc.passes.pipeline import Compilation, run_stages
from hybridc.passes.program import Program
from hybridc.passes.tighten_bound import with_tight_bound
from hybridc.progress import Progress, Silent
from hybridc.runtime.staging import least_host_bytes
from hybridc.targets import Target
from hybridc.tuning import tuner_of

if TYPE_CHECKING:
    import onnx

    Model = str | Path | bytes | onnx.ModelProto | ImportedModel


@dataclass(frozen=True, slots=True)
class Compiled:
    """What `compile_model` made; `path` is None if it was told to stop before there was an artifact."""

    path: Path | None
    plans: tuple[Plan, ...]
    """One for each distinct budget, smallest first."""
    graphs: tuple[Graph, ...]
    """What each plan is of."""
    seconds: dict[str, float] = field(default_factory=dict)
    tuned: Mapping[str, str] = field(default_factory=dict)
    """Labels of the tiles that were measured to be faster than the predicted ones, by function."""
    measured_us: Mapping[tuple[str, Device], float] = field(default_factory=dict)
    """Times that were measured for the planner, by function and device."""

    @property
    def plan(self) -> Plan | None:
        """That of the largest budget."""
        return self.plans[-1] if self.plans else None


@dataclass(frozen=True, slots=True)
class Planned:
    """What `plan_model` found, and the figures that a sensible budget lies between."""

    plans: tuple[Plan, ...]
    """One for each distinct budget, smallest first."""
    graphs: tuple[Graph, ...]
    """What each plan is of."""
    pins: tuple[Pins, ...]
    """Devices that the user gave kernels, for each plan."""
    all_gpu_peak_bytes: int
    smallest_budget_bytes: int
    smallest_bytes_bound: int
    """No plan of any of the ways to cut the network up needs less."""
    machine: Machine
    """The profile, with measured times where there are some."""

    @property
    def plan(self) -> Plan:
        """That of the largest budget."""
        return self.plans[-1]


def compile_model(
    source: Model, output: str | Path | None, options: CompileOptions, progress: Progress | None = None
) -> Compiled:
    """Compile a model to the folder `output`, which is not needed with `options.stop_after`.

    Raises HybridcError; nothing half written is left behind.
    """
    if options.stop_after is None:
        output = _check_means(output, options.target)
    watch = _Watch(progress or Silent())
    with watch("import"):
        model, start = import_model(source, options)
    tuner = tuner_of(options, watch.progress)
    with watch("passes"):
        done = run_stages(
            _with_measurements(replace(start, chooser=tuner), options, watch.progress),
            watch.progress,
            stop_after=options.stop_after,
            dump_ir=options.dump_ir,
        )

    def made(path: Path | None) -> Compiled:
        chosen = tuner.chosen if tuner else {}
        return Compiled(path, done.plans, _graphs(done), watch.seconds, chosen, done.machine.measured_us)

    if output is None or options.stop_after is not None:
        return made(None)

    def build(folder: Path) -> Contents:
        library = _generate_code(done, folder, watch.progress)
        return _contents(model, done, library, options)

    _check_host_memory(done, options.host_memory_bytes)
    with watch("code"):
        store(output, done.weights, build)
    return made(Path(output))


def _check_means(output: str | Path | None, target: Target) -> Path:
    """What is certain to fail after minutes of work fails at once."""
    if output is None:
        raise missing_output()
    check_destination(Path(output))
    check_compiler()
    if target.has_gpu:
        check_architectures(target.cuda_architectures)
    return Path(output)


def _arena_limit(limit_bytes: int | None, program: Program) -> int | None:
    """What the host's arena may have, so that the slots of streamed weights find room beside it."""
    if limit_bytes is None:
        return None
    return max(0, limit_bytes - least_host_bytes([w.nbytes for w in program.weights.values()], 0))


def _check_host_memory(done: Compilation, limit_bytes: int | None) -> None:
    for tiling, plan in zip(done.chosen, done.plans, strict=True):
        copied = {step.tensor for step in plan.steps if isinstance(step, Copy)}
        weights = (tiling.graph.tensor[name] for name in sorted(copied))
        sizes = [weight.size_bytes for weight in weights if weight.role is Role.WEIGHT]
        needed_bytes = least_host_bytes(sizes, plan.arena_bytes(Device.CPU))
        if limit_bytes is not None and needed_bytes > limit_bytes:
            budget = "" if plan.budget_bytes is None else f" for {plan.budget_bytes:,} bytes of GPU memory"
            what = f"the plan{budget} needs at least {needed_bytes:,} bytes of host memory"
            raise PlanError(
                "HC204",
                f"{what}, but {limit_bytes:,} are allowed",
                remedy=f"raise --host-memory to {format_budget(needed_bytes)}, or raise --gpu-memory",
            )


def plan_model(
    source: Model,
    options: CompileOptions,
    progress: Progress | None = None,
    *,
    bound_seconds: float | None = None,
) -> Planned:
    """Plan a model without generating code, which needs no GPU.

    With `bound_seconds` that much effort for each plan tightens the bound on its time. Raises HybridcError.
    """
    if bound_seconds is not None:
        check_bound_seconds(bound_seconds, options.target)
    progress = progress or Silent()
    _, start = import_model(source, options)
    start = _with_measurements(start, options, progress)
    done = run_stages(start, progress, stop_after="verify", dump_ir=options.dump_ir)
    _check_host_memory(done, options.host_memory_bytes)
    smallest_bytes = bound_bytes = 0
    if options.target.has_gpu:
        smallest_bytes = min(smallest_budget_bytes(t.graph, done.machine, t.pins) for t in done.tilings)
        bound_bytes = min(smallest_bytes_bound(t.graph, done.machine, t.pins) for t in done.tilings)
    plans, pins = done.plans, tuple(tiling.pins for tiling in done.chosen)
    if bound_seconds is not None:
        progress.stage("bound")
        pairs = zip(done.chosen, plans, strict=True)
        plans = tuple(with_tight_bound(t, done.machine, plan, bound_seconds) for t, plan in pairs)
    peak_bytes = done.all_gpu_peak_bytes
    return Planned(plans, _graphs(done), pins, peak_bytes, smallest_bytes, bound_bytes, done.machine)


def _with_measurements(start: Compilation, options: CompileOptions, progress: Progress) -> Compilation:
    return replace(
        start, profiler=profiler_of(options, progress), rounding=rounding_errors_of(options, progress)
    )


def _graphs(done: Compilation) -> tuple[Graph, ...]:
    return tuple(tiling.graph for tiling in done.chosen)


def import_model(source: Model, options: CompileOptions) -> tuple[ImportedModel, Compilation]:
    """Read a model, unless it is read already, and what the stages start from.

    Raises ModelError or UsageError.
    """
    if isinstance(source, ImportedModel):
        model = source
    else:
        model = read_model(source, shapes=dict(options.shapes), dims=dict(options.dims))
    program = Program(model.module, model.weights, model.origins)
    start = Compilation(
        program,
        options.target,
        options.machine,
        options.gpu_memory,
        pins=options.pins,
        effort=Effort(options.plan_seconds),
        carried=model.carried,
        host_bytes=_arena_limit(options.host_memory_bytes, program),
        winograd=options.fast_algorithms,
        precision=options.precision,
        bf16_error=options.bf16_error,
    )
    return model, start


def _generate_code(done: Compilation, folder: Path, progress: Progress) -> BuiltLibrary:
    assert done.lowered is not None
    if done.target.has_gpu:
        preload()  # TVM embeds a CUDA image only where a driver can be loaded, a stub will do
    compile_cuda = partial(compile_fatbin, architectures=done.target.cuda_architectures)
    return build_library(
        done.lowered.module, done.target, folder, cuda_compile=compile_cuda, progress=progress.kernels
    )


def _contents(
    model: ImportedModel, done: Compilation, library: BuiltLibrary, options: CompileOptions
) -> Contents:
    assert done.lowered is not None
    return Contents(
        graphs=_graphs(done),
        plans=done.plans,
        pins=tuple(tiling.pins for tiling in done.chosen),
        lowered=done.lowered.plans,
        target=done.target,
        inputs=_ports(model.inputs),
        outputs=_ports(model.outputs),
        source=Source(model.source.name, model.source.sha256, model.source.opset),
        machine=done.machine,
        host_memory_bytes=options.host_memory_bytes,
        cuda_source=library.cuda_source,
        cuda_image_key=None if library.cuda_image is None else image_key(library.cuda_image),
        threads=options.threads,
    )


def _ports(values: tuple[ValueInfo, ...]) -> tuple[Port, ...]:
    return tuple(Port(v.name, v.shape, v.dtype) for v in values)


class _Watch:
    """Seconds of each part, and the progress told to the user."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self.progress.stage(part)
        start = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - start
