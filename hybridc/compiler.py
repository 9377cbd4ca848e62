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
from hybridc.codegen.cuda import check_architectures, compile_fatbin
from hybridc.codegen.library import BuiltLibrary, build_library, check_compiler
from hybridc.emulator import image_key, preload
from hybridc.errors import UsageError
from hybridc.frontend import ImportedModel, ValueInfo, read_model
from hybridc.ir import Graph, Plan
from hybridc.options import CompileOptions
from hybridc.passes.pipeline import Compilation, run_stages
from hybridc.passes.plan import all_gpu_peak_bytes, smallest_budget_bytes
from hybridc.passes.program import Program
from hybridc.progress import Progress, Silent
from hybridc.targets import Target
from hybridc.tuning import tuner_of

if TYPE_CHECKING:
    import onnx

    Model = str | Path | bytes | onnx.ModelProto


@dataclass(frozen=True, slots=True)
class Compiled:
    """What `compile_model` made; `path` is None if it was told to stop before there was an artifact."""

    path: Path | None
    graph: Graph | None
    plan: Plan | None
    seconds: dict[str, float] = field(default_factory=dict)
    tuned: Mapping[str, str] = field(default_factory=dict)
    """Labels of the tiles that were measured to be faster than the predicted ones, by function."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What `plan_model` found, and the two figures that a sensible budget lies between."""

    graph: Graph
    plan: Plan
    all_gpu_peak_bytes: int
    smallest_budget_bytes: int


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
            replace(start, chooser=tuner),
            watch.progress,
            stop_after=options.stop_after,
            dump_ir=options.dump_ir,
        )
    if output is None or options.stop_after is not None:
        return Compiled(None, done.graph, done.plan, watch.seconds, tuner.chosen if tuner else {})

    def build(folder: Path) -> Contents:
        library = _generate_code(done, folder, watch.progress)
        return _contents(model, done, library, options)

    with watch("code"):
        store(output, done.program.weights, build)
    return Compiled(Path(output), done.graph, done.plan, watch.seconds, tuner.chosen if tuner else {})


def _check_means(output: str | Path | None, target: Target) -> Path:
    """What is certain to fail after minutes of work fails at once."""
    if output is None:
        raise UsageError("HC522", "no output is named", remedy="give -o OUT.hyb, or stop early: --stop-after")
    check_destination(Path(output))
    check_compiler()
    if target.has_gpu:
        check_architectures(target.cuda_architectures)
    return Path(output)


def plan_model(source: Model, options: CompileOptions, progress: Progress | None = None) -> Planned:
    """Plan a model without generating code, which needs no GPU. Raises HybridcError."""
    _, start = import_model(source, options)
    done = run_stages(start, progress or Silent(), stop_after="verify", dump_ir=options.dump_ir)
    assert done.graph is not None and done.plan is not None
    smallest = smallest_budget_bytes(done.graph, options.machine) if options.target.has_gpu else 0
    return Planned(done.graph, done.plan, all_gpu_peak_bytes(done.graph), smallest)


def import_model(source: Model, options: CompileOptions) -> tuple[ImportedModel, Compilation]:
    """Read a model, and what the stages start from. Raises ModelError or UsageError."""
    model = read_model(source, shapes=dict(options.shapes), dims=dict(options.dims))
    program = Program(model.module, model.weights, model.origins)
    start = Compilation(
        program, options.target, options.machine, options.gpu_memory, winograd=options.winograd
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
    assert done.graph is not None and done.plan is not None and done.lowered is not None
    return Contents(
        graph=done.graph,
        plan=done.plan,
        target=done.target,
        inputs=_ports(model.inputs, done.graph.inputs),
        outputs=_ports(model.outputs, done.graph.outputs),
        source=Source(model.source.name, model.source.sha256, model.source.opset),
        host_weights=done.lowered.host_weights,
        resident_weights=done.lowered.resident_weights,
        event_count=done.lowered.event_count,
        cuda_source=library.cuda_source,
        cuda_image_key=None if library.cuda_image is None else image_key(library.cuda_image),
        threads=options.threads,
    )


def _ports(values: tuple[ValueInfo, ...], tensors: tuple[str, ...]) -> tuple[Port, ...]:
    return tuple(Port(v.name, tensor, v.shape, v.dtype) for v, tensor in zip(values, tensors, strict=True))


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
