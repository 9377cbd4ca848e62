"""One function per stage, from the record of one phase to that of the next, and how its result is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from tvm import relax

from hybridc.compile_cache import Cache, content_of, remembered
from hybridc.errors import PlanError
from hybridc.ir import Graph, Plan
from hybridc.ir.plan import plan_to_json
from hybridc.ir.verify import verify
from hybridc.machine import BF16_SPEEDUP, Machine
from hybridc.machines.verify_times import verify_times
from hybridc.native import can_build
from hybridc.options import FP16, FP32, INT8, TF32
from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.canonicalize.sharing import share_equal
from hybridc.passes.canonicalize.subnormals import drop_subnormal_weights
from hybridc.passes.estimate import estimated_us
from hybridc.passes.fuse.attention import Attention, attention_operands, fuse_attention
from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.fuse.heads import join_heads
from hybridc.passes.fuse.separable import fuse_separable
from hybridc.passes.guards import with_guards
from hybridc.passes.layout.layout import choose_layout
from hybridc.passes.lower.lower import cuda_target, lower
from hybridc.passes.padding import without_padding
from hybridc.passes.phases import (
    FusedNetwork,
    GraphedNetwork,
    ImportedNetwork,
    Job,
    LoweredNetwork,
    PlannedNetwork,
    ScheduledNetwork,
    TiledNetwork,
    Times,
    budget_bytes,
)
from hybridc.passes.planner.choose_tilings import ColumnCut, Tiling, choose_tilings
from hybridc.passes.planner.make_plans import make_plans, plans_so_far
from hybridc.passes.planner.model.caches import leaves_caches_whole
from hybridc.passes.planner.model.context import UNWATCHED, Effort
from hybridc.passes.planner.model.pins import carried_pins, resolve_pins
from hybridc.passes.planner.model.problem import UNLIMITED_BYTES
from hybridc.passes.planner.other_ways import layer_split
from hybridc.passes.planner.robust import make_robust_plans
from hybridc.passes.planner.search.partition import (
    MOST_GRID_KERNELS,
    all_gpu_peak_bytes,
    first_plans,
    needs_no_gpu,
    smallest_budget_bytes,
)
from hybridc.passes.planner.side_by_side import cut_by_bandwidth, cut_worth_making, second_kernels, with_heads
from hybridc.passes.planner.tighten_bound import with_tight_bound
from hybridc.passes.planner.watch import Stop, Watch
from hybridc.passes.precision.gpu_step import reduce_gpu_step_precision
from hybridc.passes.precision.integer_caches import store_integer_caches
from hybridc.passes.precision.narrow_storage import store_narrow
from hybridc.passes.precision.precision import (
    choose_halves,
    mark_integers,
    multiply_tf32,
    reduce_precision,
    reduce_step_precision,
)
from hybridc.passes.precision.quantized import QUANTIZED_RULES, multiply_integers
from hybridc.passes.precision.requantize import requantize
from hybridc.passes.precision.wide_program import in_float32
from hybridc.passes.program.program import Program
from hybridc.passes.read_graph import read_graph
from hybridc.passes.schedule import choose_tiles, schedule_functions, schedule_requests
from hybridc.passes.tiling.side_by_side import large_products, side_by_side
from hybridc.passes.tiling.tile import tile
from hybridc.passes.tiling.working_set import kernel_groups
from hybridc.progress import Progress
from hybridc.schedules.cuda.attention.attention import is_suitable
from hybridc.schedules.storage import NARROW

TILING_LEVELS = 5
"""A network is tiled to a half, a quarter, ... 1/32 of what it needs; smaller tiles are mostly launches."""
MAX_TILED_KERNELS = MOST_GRID_KERNELS
"""Tilings with more kernels are not tried: planning them takes minutes, and their launches take long."""

T = TypeVar("T")
ToGraph = Callable[[ImportedNetwork, Progress], GraphedNetwork]


# -------------------------------------------------------------------------------- network -> operators


def canonicalize_network(c: ImportedNetwork, _: Progress) -> ImportedNetwork:
    """Rewrite operators to forms that later stages know. Raises ModelError as `canonicalize` does."""
    program, narrow = in_float32(c.program)
    program = drop_subnormal_weights(share_equal(canonicalize(program)))
    return replace(c, program=program, narrow=narrow.joined(c.narrow))


def fuse_cpu_attention(c: ImportedNetwork, _: Progress) -> ImportedNetwork:
    """Where a CPU runs alone. Beside a GPU `fuse_network` does it, as tiles are those of the operators."""
    return c if c.job.options.target.has_gpu else replace(c, program=fuse_attention(c.program))


def choose_cpu_layout(c: ImportedNetwork, _: Progress) -> ImportedNetwork:
    """Where a CPU runs alone, as before."""
    options = c.job.options
    if options.target.has_gpu:
        return c
    if options.precision != INT8:
        return replace(c, program=choose_layout(c.program, options.target.isa))
    blocked = choose_layout(c.program, options.target.isa, QUANTIZED_RULES)
    return replace(c, program=requantize(blocked))


# ---------------------------------------------------------------------------------- operators -> graph


def fuse_network(c: ImportedNetwork, _: Progress) -> FusedNetwork:
    """One PrimFunc for each kernel. Raises ModelError HC150 for an operator that no kernel can compute."""
    target = c.job.options.target
    # not before the network is tiled: tiles are those of its operators
    whole, precision = c.program, c.job.options.precision
    if target.has_gpu and precision == INT8:
        whole = multiply_integers(whole, target.isa)
    if target.has_gpu:
        is_narrow = bool(c.narrow.nodes) or precision == FP16 or c.job.options.trains_in_bf16
        suits = partial(_has_attention_kernel, is_narrow=is_narrow)
        whole = join_heads(whole, attention_operands(whole, suits), c.library.weights)
        whole = fuse_attention(whole, suits)
    program = fuse(whole, c.library.table)
    return FusedNetwork(c.job, program, c.library, c.narrow, unfused=c.program)


def _has_attention_kernel(match: Attention, *, is_narrow: bool) -> bool:
    """Whether the GPU, too, has a schedule for it that is better than those of its operators."""
    return is_suitable(match.rows, match.depth, match.width, is_narrow=is_narrow)


def fuse_cpu_separable(c: FusedNetwork, _: Progress) -> FusedNetwork:
    """Where a CPU runs alone; after `fuse`, which has put their epilogues into both convolutions."""
    target = c.job.options.target
    if target.has_gpu:
        return c
    return replace(c, program=fuse_separable(c.program, target, c.job.options.cpu_threads, c.library.table))


def reduce_network_precision(c: FusedNetwork, _: Progress) -> FusedNetwork:
    """Mark functions that multiply bf16, tf32 or integers, where the options ask for it; store 16-bit floats,
    and caches in rows of integers. Raises UsageError HC539 for caches that cannot be stored so.

    Requires: for fp16 and tf32, and for bf16 unless any error is allowed, `job.rounding`.
    """
    options, program, halved, rounded = c.job.options, c.program, frozenset[str](), frozenset[relax.Var]()
    if options.precision == INT8:
        program = mark_integers(program)
    elif options.trains_in_bf16 and options.target.has_gpu:
        program, rounded = reduce_gpu_step_precision(
            program, options.target, options.machine.gpu, winograd=options.fast_algorithms
        )
    elif options.trains_in_bf16:
        program, rounded = reduce_step_precision(
            program,
            options.target,
            winograd=options.fast_algorithms,
            threads=options.cpu_threads,
            speedup=options.machine.cpu.bf16_speedup or BF16_SPEEDUP,
        )
    elif options.precision != FP32:
        if c.job.rounding is None:
            raise ValueError(f"{options.precision} needs a measurement of rounding errors")
        if options.precision == FP16:
            program, halved = choose_halves(program, options.rounding_error, c.job.rounding)
        elif options.precision == TF32:
            program = multiply_tf32(
                program,
                options.target,
                options.rounding_error,
                c.job.rounding,
                options.machine.gpu,
                winograd=options.fast_algorithms,
            )
        else:
            program = reduce_precision(
                program,
                options.target,
                options.rounding_error,
                c.job.rounding,
                winograd=options.fast_algorithms,
                threads=options.cpu_threads,
                speedup=options.machine.cpu.bf16_speedup or BF16_SPEEDUP,
                functions=c.library.table,
            )
    program = store_narrow(program, c.narrow, options.target, halved, rounded)
    return replace(c, program=store_integer_caches(program, c.narrow.integers))


def schedule_network(c: FusedNetwork, progress: Progress) -> ScheduledNetwork:
    """Schedule the functions that the library has no code for, for each device of the target."""
    options, known = c.job.options, c.library.scheduled
    requests = schedule_requests(
        c.program,
        options.target,
        known,
        winograd=options.fast_algorithms,
        int8_activations=options.int8_activations,
        threads=options.cpu_threads,
        gpu=options.machine.gpu,
        many_sizes=c.job.many_sizes,
        open_dimensions=any(c.job.open_axes.values()),
    )
    scheduled = schedule_functions(requests, c.job.devices, progress.kernels, c.job.cache)
    if c.job.chooser is not None:
        scheduled = choose_tiles(c.program, requests, scheduled, c.job.chooser)
    library = replace(
        c.library,
        scheduled={**known, **scheduled},
        weights={**c.library.weights, **c.program.weights},
    )
    return ScheduledNetwork(c.job, c.program, library, c.narrow, unfused=c.unfused)


def read_network_graph(c: ScheduledNetwork, _: Progress) -> GraphedNetwork:
    """Kernels and tensors with their costs; from here on no stage but `tile` and `lower` needs TVM."""
    graph = with_guards(read_graph(c.program, c.scheduled, c.job.loop_carried))
    return GraphedNetwork(c.job, c.program, c.library, c.narrow, unfused=c.unfused, graph=graph)


def estimate_network(c: GraphedNetwork, _: Progress) -> GraphedNetwork:
    """Estimate the times of the GPU functions that the kernels call, those that have none yet."""
    options, known = c.job.options, c.library.estimated_us
    calibrated = options.machine.gpu.efficiencies
    called = {kernel.function for kernel in c.graph.kernels if kernel.family not in calibrated}
    new = {key: made for key, made in c.scheduled.items() if key[0] in called and key not in known}
    found = estimated_us(new, options.machine, options.target, c.job.cache)
    return replace(c, library=replace(c.library, estimated_us={**known, **found}))


def profile_network(c: GraphedNetwork, _: Progress) -> GraphedNetwork:
    """Measure the functions that the kernels call, those that are not measured yet, if the job says so."""
    called = {kernel.function for kernel in c.graph.kernels} - c.library.profiled
    if c.job.profiler is None or not called:
        return c
    measured_us = c.job.profiler({key: made for key, made in c.scheduled.items() if key[0] in called})
    library = replace(
        c.library,
        profiled=c.library.profiled | called,
        measured_us={**c.library.measured_us, **measured_us},
    )
    return replace(c, library=library)


def skip_padding(c: GraphedNetwork, _: Progress) -> GraphedNetwork:
    """Kernels that compute no more than a run's sizes need, where dimensions are open."""
    target, library = c.job.options.target, c.library
    functions = {g.name_hint: f for g, f in c.program.functions.items()}
    gpu = cuda_target(target) if target.has_gpu else None
    graph, made, origins = without_padding(c.graph, functions, c.scheduled, c.job.open_axes, gpu)
    if not made:
        return c

    def known(times: Times) -> Times:
        """Those of the largest sizes hold for the functions that skip padding, too."""
        return {**times, **{(n, d): times[origins[n], d] for n, d in made if (origins[n], d) in times}}

    library = replace(
        library,
        scheduled={**library.scheduled, **made},
        measured_us=known(library.measured_us),
        estimated_us=known(library.estimated_us),
    )
    return replace(c, graph=graph, library=library)


# ---------------------------------------------------------------------------- graph -> plans -> module


def tile_network(c: GraphedNetwork, progress: Progress, *, to_graph: ToGraph) -> TiledNetwork:
    """Tile large kernels in several ways, and keep those that are predicted to pay for some budget.

    `to_graph` fuses, schedules and measures the functions of a tiling as it did those of the whole network.
    """
    options = c.job.options
    whole = Tiling(c.graph, resolve_pins(c.graph, options.pins))
    if not options.target.has_gpu:
        return TiledNetwork(c, (whole,), 0)
    peak_bytes = all_gpu_peak_bytes(c.graph, c.machine)
    if not options.gpu_memory:
        return TiledNetwork(c, (whole,), peak_bytes)
    budgets = budget_bytes(c.job, peak_bytes)
    largest_bytes = max(budgets)
    if c.job.watch is not None:
        c.job.watch.begin(budgets, c.job.host_arena_bytes)
    _first_plans(c.job, whole, c.machine, budgets)
    limits = sorted(peak_bytes >> level for level in range(1, TILING_LEVELS + 1))
    few = c.job.tile_limits
    if _is_best_on_cpu(c, whole):
        limits, few = [], None
    c, found = _tilings(c, whole, limits if few is None else few, largest_bytes, to_graph, progress)
    if few is not None and not _some_fits((whole, *found), c.machine, min(budgets)):
        c, found = _tilings(c, whole, limits, largest_bytes, to_graph, progress)
    ways = (whole, *reversed(found))
    if not _some_fits(ways, c.machine, largest_bytes):
        least = min(ways, key=lambda way: smallest_budget_bytes(way.graph, c.machine, way.pins))
        return TiledNetwork(c, (least,), peak_bytes)  # whose planning tells what is needed
    for tiling in found:
        _first_plans(c.job, tiling, c.machine, budgets)  # where the whole network does not fit

    def choose() -> tuple[Tiling, ...]:
        return _search(
            c.job.cache,
            partial(choose_tilings, watch=c.job.watch or UNWATCHED),
            ways,
            c.machine,
            peak_bytes,
            largest_bytes,
            Effort(options.plan_seconds),
            c.job.host_arena_bytes,
        )

    # all ways, where it is stopped: any of them may be that of the best plan so far
    tilings = _watched(c.job.watch, choose, lambda _: ways)
    c, sides = _side_by_side(c, whole, to_graph, progress)
    return TiledNetwork(c, (*tilings, *sides), peak_bytes)


def _side_by_side(
    c: GraphedNetwork, whole: Tiling, to_graph: ToGraph, progress: Progress
) -> tuple[GraphedNetwork, list[Tiling]]:
    """The network with its large products in two parts, the second one for the CPU, if that may pay."""
    if whole.pins:
        return c, []  # kernels have other names there
    products = large_products(c.unfused)
    weight_bytes = {product.weight: product.weight_bytes for product in products}
    cut = c.job.cut if c.job.many_sizes and _is_decided(c.job) else _cut(c, weight_bytes)
    if cut is None:
        return c, []
    made = side_by_side(c.unfused, [p for p in products if p.weight in cut.weights], cut.share, cut.heads)
    if made is None:
        return c, []
    narrow = c.narrow.in_parts(made.inputs, made.outputs)
    graphed = to_graph(ImportedNetwork(c.job, made.program, c.library, narrow), progress)
    progress.stage("tile")
    c = replace(c, library=graphed.library)
    graph = graphed.graph
    presents = ((graph.outputs[first], graph.outputs[second]) for first, second in made.outputs.items())
    graph = replace(graph, parts=(*made.inputs.values(), *presents))
    second = second_kernels(graph, made.second_weights | {other for _, other in graph.parts})
    if not second or not leaves_caches_whole(graph, whole.graph):
        return c, []
    return c, [Tiling(graph, second=second, cut=cut, is_required=c.job.many_sizes)]


def _is_decided(job: Job) -> bool:
    """Whether the cut of all sizes is known: it is decided for the largest."""
    return job.cut is not None or job.tile_limits is not None


def _cut(c: GraphedNetwork, weight_bytes: Mapping[str, int]) -> ColumnCut | None:
    """Where large products are cut, if it may pay; with several sizes only in a decoder that does not fit."""
    peak_bytes = all_gpu_peak_bytes(c.graph, c.machine)
    largest_bytes = max(budget_bytes(c.job, peak_bytes))
    if not c.job.many_sizes:
        cut = cut_worth_making(weight_bytes, c.graph, c.machine)
    elif c.graph.caches and largest_bytes < peak_bytes:
        cut = cut_by_bandwidth(weight_bytes, c.machine)
    else:
        return None
    return cut if cut is None else with_heads(cut, weight_bytes, c.graph, c.machine, largest_bytes)


def _is_best_on_cpu(c: GraphedNetwork, whole: Tiling) -> bool:
    """Whether the whole network needs no GPU, and so no tiles. The answer is the same for every budget: more
    memory does not take away a tiling that a smaller budget has."""
    if whole.graph.caches or c.job.options.robust:
        return False  # caches may change their place, and machines around the profile have other times
    return needs_no_gpu(whole.context(c.machine, Effort(), c.job.host_arena_bytes))


def _some_fits(ways: Sequence[Tiling], machine: Machine, budget_bytes: int) -> bool:
    return any(smallest_budget_bytes(each.graph, machine, each.pins) <= budget_bytes for each in ways)


def _tilings(
    c: GraphedNetwork,
    whole: Tiling,
    limits: Sequence[int],
    largest_bytes: int,
    to_graph: ToGraph,
    progress: Progress,
) -> tuple[GraphedNetwork, list[Tiling]]:
    """The network with the functions of its tilings, and these: up to each of the limits, the finest first,
    as far as it is worthwhile for budgets up to `largest_bytes`."""
    widening = _widening(c.graph)
    found: list[Tiling] = []
    if len(c.graph.kernels) > MAX_TILED_KERNELS:
        return c, found
    for limit_bytes in limits:
        if c.job.watch is not None and c.job.watch.is_content():
            break  # what is tiled is not planned any more
        program = tile(c.unfused, int(limit_bytes * widening))
        if program is c.unfused:
            break  # all kernels are within this limit
        if found and limit_bytes > largest_bytes and _some_fits((whole, *found), c.machine, largest_bytes):
            break  # no budget could use larger tiles; where nothing fits, these may need less
        if _kernel_count(program) > MAX_TILED_KERNELS:
            continue
        tiled = to_graph(ImportedNetwork(c.job, program, c.library, c.narrow), progress)
        progress.stage("tile")  # again, after the stages of the tiling
        c = replace(c, library=tiled.library)
        pins = carried_pins(whole.graph, whole.pins, tiled.graph)
        if pins is not None and leaves_caches_whole(tiled.graph, whole.graph):
            found.append(Tiling(tiled.graph, pins, limit_bytes))
    return c, found


def _widening(graph: Graph) -> float:
    """Bytes of tensors before fusion, where all floats have 32 bits, over those that they have in memory."""
    stored = sum(tensor.size_bytes for tensor in graph.tensors)
    narrow = sum(tensor.size_bytes for tensor in graph.tensors if tensor.dtype in NARROW)
    return (stored + narrow) / stored if stored else 1.0


def _kernel_count(program: Program) -> int:
    """How many kernels `fuse` will make of a program."""
    return sum(not group.is_view for group in kernel_groups(program))


def plan_network(c: TiledNetwork, progress: Progress) -> PlannedNetwork:
    """The fastest plan for each budget. Raises PlanError HC201 or HC203 as `make_plans` does."""
    watch = c.job.watch
    if watch is not None and not watch.budgets:
        watch.begin((UNLIMITED_BYTES,), c.job.host_arena_bytes)
    make = make_robust_plans if c.job.options.robust else make_plans

    def search() -> tuple[tuple[Tiling, Plan], ...]:
        return _search(
            c.job.cache,
            partial(make, report=progress.kernels, watch=watch),
            c.tilings,
            c.machine,
            c.budgets,
            c.job.devices,
            effort=Effort(c.job.options.plan_seconds),
            host_bytes=c.job.host_arena_bytes,
        )

    found = _watched(watch, search, lambda watch: plans_so_far(watch, c.machine))
    chosen, plans = zip(*found, strict=True)
    planning = None if watch is None else watch.time()
    return PlannedNetwork(c.whole, c.tilings, c.all_gpu_peak_bytes, chosen, plans, planning)


def _first_plans(job: Job, tiling: Tiling, machine: Machine, budgets: Sequence[int]) -> None:
    """Let the watch have plans of a tiling, unless every budget has one."""
    watch = job.watch
    if watch is None or watch.is_complete:
        return
    context = tiling.context(machine, Effort(), job.host_arena_bytes)
    with suppress(PlanError):  # it does not fit, but another may
        for placed in _search(job.cache, first_plans, context, tuple(budgets)):
            watch.found(context, placed)
    if tiling.graph.caches and not tiling.pins:  # those above have all caches on the host
        for placed in filter(None, (layer_split(context, b) for b in budgets)):
            watch.found(context, placed)


def _watched(watch: Watch | None, search: Callable[[], T], so_far: Callable[[Watch], T]) -> T:
    """What a search finds, or if the watch has ended it or does, what there is so far."""
    if watch is None:
        return search()
    try:
        with watch.searching():
            watch.check()
            return search()
    except Stop:
        return so_far(watch)


def _search(cache: Cache, search: Callable[..., T], *problem: Any, **wishes: Any) -> T:
    """What a search of the planner finds, or what it found in this problem before."""

    def parts() -> Iterator[str]:
        # without g++ it evaluates far fewer plans
        yield content_of((getattr(search, "func", search).__name__, problem, wishes, can_build()))

    return remembered(cache, lambda: search(*problem, **wishes), parts())


def verify_network(c: PlannedNetwork, _: Progress) -> PlannedNetwork:
    """Raise PlanError HC210 to HC222 if a plan breaks what it promises."""
    for graph, plan in zip(c.graphs, c.plans, strict=True):
        verify(graph, plan)
        verify_times(graph, plan, c.machine)
    return c


def tighten_bounds(c: PlannedNetwork, seconds: float) -> PlannedNetwork:
    """With the best bounds on the times of its plans that `seconds` of a nominal machine find for each."""
    pairs = zip(c.chosen, c.plans, strict=True)
    return replace(c, plans=tuple(with_tight_bound(t, c.machine, plan, seconds) for t, plan in pairs))


def lower_network(c: PlannedNetwork, _: Progress) -> LoweredNetwork:
    """Collect the functions that the plans run, and bind the plans to them. Raises InternalError HC911."""
    lowered = lower(c.graphs, c.plans, c.library.scheduled, c.job.options.target)
    return LoweredNetwork(c.whole, c.tilings, c.all_gpu_peak_bytes, c.chosen, c.plans, c.planning, lowered)


# ------------------------------------------------------------------------------------- what they made


def show_program(c: ImportedNetwork) -> tuple[str, str]:
    """The Relax program as TVMScript."""
    return ".py", c.program.module.script()


def show_scheduled(c: ScheduledNetwork) -> tuple[str, str]:
    """The scheduled functions as TVMScript, each below its rule, packings and workspace."""
    functions = [
        f"# {name} on {device}: rule {s.rule}, packed {dict(s.packings)}, "
        f"workspace {list(s.workspace_bytes)} bytes\n"
        f"{s.function.script()}\n"
        for (name, device), s in c.scheduled.items()
    ]
    return ".py", "\n".join(functions)


def show_graph(c: GraphedNetwork) -> tuple[str, str]:
    """The graph as JSON."""
    return ".json", _json(asdict(c.graph))


def show_times(c: GraphedNetwork) -> tuple[str, str]:
    """The measured times in microseconds as JSON."""
    return ".json", _json(_listed(c.library.measured_us))


def show_estimates(c: GraphedNetwork) -> tuple[str, str]:
    """The estimated times in microseconds as JSON."""
    return ".json", _json(_listed(c.library.estimated_us))


def _listed(times: Times) -> list[dict[str, Any]]:
    return [{"function": name, "device": device.value, "us": us} for (name, device), us in times.items()]


def show_tilings(c: TiledNetwork) -> tuple[str, str]:
    """The tilings that are planned, the whole network first, as JSON."""
    return ".json", _json([asdict(tiling) for tiling in c.tilings])


def show_plans(c: PlannedNetwork) -> tuple[str, str]:
    """The plans as JSON."""
    return ".json", _json([plan_to_json(plan) for plan in c.plans])


def show_verdict(c: PlannedNetwork) -> tuple[str, str]:
    """A line for each plan that was accepted."""
    lines = [f"accepted: {len(plan.steps)} steps, {len(plan.buffers)} buffers\n" for plan in c.plans]
    return ".txt", "".join(lines)


def show_lowered(c: LoweredNetwork) -> tuple[str, str]:
    """What each lane does step by step, and the functions as TVMScript."""
    return ".py", str(c.lowered)


def _json(value: object) -> str:
    return json.dumps(value, indent=1, default=sorted) + "\n"  # sets of names
