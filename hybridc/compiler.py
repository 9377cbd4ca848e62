"""The whole story: an ONNX model and a GPU memory budget in, an artifact out.

import_model   check the file, simplify it, import it to Relax with the origin of every binding
run_stages     canonicalize, fuse, schedule, plan within the budget, verify, lower (passes/pipeline.py)
generate_code  CPU code, CUDA fatbin and the runtime's helper in one shared library
store          model.hyb: manifest, plan, library, CUDA source, weights
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridc.artifact.store import Contents, check_destination, store
from hybridc.calibrate.measurements import with_measurements
from hybridc.codegen.assemble import contents_of
from hybridc.codegen.generate import check_gpu, check_tools, generate_code
from hybridc.compile_cache import Cache, compile_cache
from hybridc.errors import ModelError
from hybridc.frontend import find_refusals
from hybridc.frontend.ranges.opening import buckets_of
from hybridc.garbage import collected_anew
from hybridc.options import CompileOptions, check_bf16_inference, check_bound_seconds, missing_output
from hybridc.passes.buckets import (
    after,
    joined,
    weights_of,
    with_agreeing_residents,
    with_budgets,
    with_shared_effort,
)
from hybridc.passes.fuse.fuse import refused_operators
from hybridc.passes.import_model import import_model, loaded, loaded_file, open_dimensions_of, sized
from hybridc.passes.instruction_sets import beside, together
from hybridc.passes.pipeline import run_stages
from hybridc.passes.planner.watch import Standing, Watch
from hybridc.passes.program.prim_funcs import NO_KERNEL
from hybridc.passes.stages.plan import tighten_bounds
from hybridc.progress import NullProgress, Progress, Stopwatch
from hybridc.report.planning import standing_text
from hybridc.results import BucketPlans, Cached, Compiled, Planned
from hybridc.runtime.staging import check_host_memory
from hybridc.sizes import Bucket
from hybridc.tuning import tuner_of

if TYPE_CHECKING:
    from hybridc.frontend import ImportedModel
    from hybridc.passes.import_model import Model
    from hybridc.passes.phases import ImportedNetwork, LoweredNetwork, PlannedNetwork

Listening = Callable[[], AbstractContextManager[Sequence[int]]]
"""Notes signals that come in a block, instead of what they do otherwise."""


def compile_model(
    source: Model, output: str | Path | None, options: CompileOptions, progress: Progress | None = None
) -> Compiled:
    """Compile a model to the folder `output`, which is not needed with `options.stop_after`.

    Raises HybridcError; nothing half written is left behind.
    """
    with compile_cache(options.cache) as cache, collected_anew():
        return _compile(source, _artifact_path(output, options), options, progress or NullProgress(), cache)


def _compile(
    source: Model, path: Path | None, options: CompileOptions, progress: Progress, cache: Cache
) -> Compiled:
    check_bf16_inference(options)
    watch = Stopwatch(progress)
    with watch("import"):
        model = loaded(source, options)
    options = sized(options, model)
    dimensions = open_dimensions_of(model, options)
    buckets = buckets_of(dimensions)
    targets = options.target.of_each if path is not None else (options.target,)
    options = with_shared_effort(options, len(buckets) * len(targets))
    sets: list[list[LoweredNetwork]] = []  # one for each CPU instruction set
    read: dict[Bucket, ImportedModel] = {}  # whatever the instruction set
    for target in targets:
        each = replace(options, target=target)
        tuner = tuner_of(each, watch.progress)
        networks: list[LoweredNetwork] = []
        for bucket in reversed(buckets):  # of the largest sizes first: percentages are of what they need
            each = with_budgets(each, sets[0] if sets else networks)
            with watch("import"):
                read[bucket], network = import_model(
                    read.get(bucket, model), each, cache, dimensions, bucket, many_sizes=len(buckets) > 1
                )
            network = after(network, networks) if networks else beside(network, sets)
            network = with_measurements(network, watch.progress, chooser=tuner)
            if options.plan_timeout is not None:
                network = _watched(network, watch.progress)
            with watch("passes"):
                made = run_stages(network, watch.progress, stop_after=each.stop_after, dump_ir=each.dump_ir)
            if path is None:  # stopped
                return Compiled.of(made, None, watch.seconds, tuner.chosen if tuner else {})
            networks.insert(0, made)
        networks = with_agreeing_residents(networks)
        sets.append(networks)
    assert path is not None
    every = together(sets)
    whole = joined(every, options.target) if len(every) > 1 or dimensions else networks[0]
    library = None

    def build(folder: Path) -> Contents:
        nonlocal library
        library = generate_code(
            whole.lowered.module,
            options.target,
            folder,
            progress.kernels,
            cache,
            many_sizes=len(buckets) > 1,
        )
        progress.stage("store")
        models = [read[bucket] for bucket in buckets]
        return contents_of(models, whole, library, dimensions, buckets if dimensions else ())

    check_host_memory(whole.graphs, whole.plans, options.host_memory_bytes)
    with watch("code"):
        store(path, weights_of(every), build)
    compiled = Compiled.of(networks[-1], path, watch.seconds, tuner.chosen if tuner else {})
    compiled = replace(compiled, buckets=BucketPlans.of_all(dimensions, buckets, networks))
    if library is None:
        return compiled
    cached = Cached(library.cached, library.functions) if options.cache else None
    return replace(compiled, cached=cached, cuda_image_bytes=library.cuda_image_bytes)


def check_model(source: str | Path, options: CompileOptions) -> tuple[ModelError, ...]:
    """Everything for which a model would be refused, in the words of `compile_model`; none if it is taken.

    Nothing is scheduled, planned or compiled. Raises UsageError for options that do not fit the model.
    """
    try:
        model = loaded_file(source, options)
    except ModelError as error:
        return (error,)
    options = sized(options, model)
    dimensions = open_dimensions_of(model, options)
    *_, largest = buckets_of(dimensions)
    refused = find_refusals(
        model,
        shapes=dict(options.shapes),
        dims=dict(options.dims),
        values=dict(options.values),
        bounds=dict(options.bounds),
        dimensions=dimensions,
        bucket=largest,
        reads_weights=options.weights,
    )
    if refused:
        return refused
    _, network = import_model(model, options, None, dimensions, largest)
    try:
        run_stages(network, NullProgress(), stop_after="fuse")
    except ModelError as error:
        if error.code != NO_KERNEL:
            return (error,)
        unfused = run_stages(network, NullProgress(), stop_after="layout")
        return refused_operators(unfused.program) or (error,)
    return ()


def plan_model(
    source: Model,
    options: CompileOptions,
    progress: Progress | None = None,
    *,
    bound_seconds: float | None = None,
    listening: Listening = lambda: nullcontext(()),
) -> Planned:
    """Plan a model without generating code, which needs no GPU.

    With `bound_seconds` that much effort for each budget tightens the bound on its times. A signal that comes
    while `listening` during the search ends it with the best plans so far. With open dimensions the plans are
    those of the largest sizes, and `buckets` has those of all. Raises HybridcError.
    """
    check_bf16_inference(options)
    check_gpu(options.target, options.machine)
    if bound_seconds is not None:
        check_bound_seconds(bound_seconds, options.target)
    progress = progress or NullProgress()
    model = loaded(source, options)
    options = sized(options, model)
    dimensions = open_dimensions_of(model, options)
    buckets = buckets_of(dimensions)
    options = with_shared_effort(options, len(buckets))
    networks: list[PlannedNetwork] = []
    with compile_cache(options.cache) as cache, collected_anew():
        for bucket in reversed(buckets):
            each = with_budgets(options, networks)
            _, network = import_model(model, each, cache, dimensions, bucket, many_sizes=len(buckets) > 1)
            network = with_measurements(after(network, networks), progress)
            network = _watched(network, progress, listening)
            made = run_stages(network, progress, stop_after="verify", dump_ir=each.dump_ir)
            check_host_memory(made.graphs, made.plans, options.host_memory_bytes)
            if bound_seconds is not None:
                progress.stage("bound")
                made = tighten_bounds(made, bound_seconds / len(buckets))
            networks.insert(0, made)
    networks = with_agreeing_residents(networks)
    planned = Planned.of(networks[-1])
    return replace(planned, buckets=BucketPlans.of_all(dimensions, buckets, networks))


def _watched(
    network: ImportedNetwork, progress: Progress, listening: Listening = lambda: nullcontext(())
) -> ImportedNetwork:
    """With a watch on the search for its plans, which tells how far it is."""
    options = network.job.options

    def tell(standing: Standing) -> None:
        progress.note(standing_text(standing, is_of_several=len(options.gpu_memory) > 1))

    watch = Watch(options.plan_timeout, listening, tell)
    return replace(network, job=replace(network.job, watch=watch))


def _artifact_path(output: str | Path | None, options: CompileOptions) -> Path | None:
    """Where the artifact goes, once it is checked; None if the compiler stops before there is one."""
    if options.stop_after is not None:
        return None
    if output is None:
        raise missing_output("give `output`, the folder to write, or `stop_after`, the last stage to run")
    check_destination(Path(output))
    check_gpu(options.target, options.machine)
    check_tools(options.target)
    return Path(output)
