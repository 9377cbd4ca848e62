"""Ways to cut a network up, of which plans may choose one for each budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from hybridc.ir import Graph
from hybridc.machine import Machine
from hybridc.passes.fuse.attention import Suits
from hybridc.passes.phases import (
    GraphedNetwork,
    ImportedNetwork,
    Job,
    TiledNetwork,
    budget_bytes,
)
from hybridc.passes.planner.choose_tilings import ColumnCut, Tiling, choose_tilings
from hybridc.passes.planner.model.caches import leaves_caches_whole
from hybridc.passes.planner.model.context import UNWATCHED, Effort
from hybridc.passes.planner.model.pins import carried_pins, resolve_pins
from hybridc.passes.planner.search.partition import (
    MOST_GRID_KERNELS,
    all_gpu_peak_bytes,
    needs_no_gpu,
    smallest_budget_bytes,
)
from hybridc.passes.planner.side_by_side import cut_by_bandwidth, cut_worth_making, second_kernels, with_heads
from hybridc.passes.precision.integer_caches import UnstorableCacheError
from hybridc.passes.program.program import Program, is_same
from hybridc.passes.stages.channels_last import FromFused, with_channels_last
from hybridc.passes.stages.program import gpu_attention
from hybridc.passes.stages.searches import remembered_search, search_first_plans, watched
from hybridc.passes.tiling.side_by_side import large_products, side_by_side
from hybridc.passes.tiling.tile import tile
from hybridc.passes.tiling.working_set import kernel_groups
from hybridc.progress import Progress
from hybridc.schedules.storage import NARROW

TILING_LEVELS = 5
"""A network is tiled to a half, a quarter, ... 1/32 of what it needs; smaller tiles are mostly launches."""
MAX_TILED_KERNELS = MOST_GRID_KERNELS
"""Tilings with more kernels are not tried: planning them takes minutes, and their launches take long."""

ToGraph = Callable[[ImportedNetwork, Progress], GraphedNetwork]


def tile_network(
    c: GraphedNetwork, progress: Progress, *, to_graph: ToGraph, from_fused: FromFused
) -> TiledNetwork:
    """Tile large kernels in several ways, and keep those that are predicted to pay for some budget; each of
    them once more with channels last, where a GPU gains by that.

    `to_graph` fuses, schedules and measures the functions of a tiling as it did those of the whole network,
    `from_fused` schedules and measures those with channels last.
    """
    options = c.job.options
    whole = Tiling(c.graph, resolve_pins(c.graph, options.pins))
    if not options.target.has_gpu:
        return TiledNetwork(c, (whole,), 0)
    peak_bytes = all_gpu_peak_bytes(c.graph, c.machine)
    if not options.gpu_memory:
        c, same_kernels = _channels_last(c, [(whole, c)], from_fused, progress)
        return TiledNetwork(c, (whole, *same_kernels), peak_bytes)
    budgets = budget_bytes(c.job, peak_bytes)
    largest_bytes = max(budgets)
    if c.job.watch is not None:
        c.job.watch.begin(budgets, c.job.host_arena_bytes)
    search_first_plans(c.job, whole, c.machine, budgets)
    limits = sorted(peak_bytes >> level for level in range(1, TILING_LEVELS + 1))
    few = c.job.tile_limits
    needs_gpu = not _is_best_on_cpu(c, whole)
    if not needs_gpu:
        limits, few = [], None
    c, made = _tilings(c, whole, limits if few is None else few, largest_bytes, to_graph, progress)
    if few is not None and not _some_fits((whole, *(t for t, _ in made)), c.machine, min(budgets)):
        c, made = _tilings(c, whole, limits, largest_bytes, to_graph, progress)
    found = [tiling for tiling, _ in made]
    ways = (whole, *reversed(found))
    if not _some_fits(ways, c.machine, largest_bytes):
        least = min(ways, key=lambda way: smallest_budget_bytes(way.graph, c.machine, way.pins))
        return TiledNetwork(c, (least,), peak_bytes)  # whose planning tells what is needed
    for tiling in found:
        search_first_plans(c.job, tiling, c.machine, budgets)  # where the whole network does not fit

    def choose() -> tuple[Tiling, ...]:
        return remembered_search(
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
    tilings = watched(c.job.watch, choose, lambda _: ways)
    graphed = {tiling.limit_bytes: each for tiling, each in ((whole, c), *made)}
    of_tilings = [(tiling, graphed[tiling.limit_bytes]) for tiling in tilings if needs_gpu]
    c, same_kernels = _channels_last(c, of_tilings, from_fused, progress)
    c, sides = _side_by_side(c, whole, to_graph, progress)
    return TiledNetwork(c, (*tilings, *same_kernels, *sides), peak_bytes)


def _channels_last(
    c: GraphedNetwork,
    made: Sequence[tuple[Tiling, GraphedNetwork]],
    from_fused: FromFused,
    progress: Progress,
) -> tuple[GraphedNetwork, list[Tiling]]:
    """Tilings with channels last where a GPU gains by that: the same kernels, for the same budgets."""
    found: list[Tiling] = []
    for tiling, graphed in made:
        if c.job.watch is not None and c.job.watch.is_content():
            break
        other = with_channels_last(replace(graphed, library=c.library), from_fused, progress)
        if other is not None:
            c = replace(c, library=other.library)
            found.append(replace(tiling, graph=other.graph))
        elif not tiling.is_cut_up:
            break  # tiles gain no more than the whole network, and their functions are many
    progress.stage("tile")
    return c, found


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
    graphed = _graphed(ImportedNetwork(c.job, made.program, c.library, narrow), to_graph, progress)
    if graphed is None:
        return c, []
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
    return cut if cut is None else with_heads(cut, weight_bytes, c.graph, largest_bytes)


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
) -> tuple[GraphedNetwork, list[tuple[Tiling, GraphedNetwork]]]:
    """The network with the functions of its tilings, and these: up to each of the limits, the finest first,
    as far as it is worthwhile for budgets up to `largest_bytes`."""
    widening = _widening(c.graph)
    found: list[tuple[Tiling, GraphedNetwork]] = []
    if len(c.graph.kernels) > MAX_TILED_KERNELS:
        return c, found
    finer = c.unfused
    for limit_bytes in limits:
        if c.job.watch is not None and c.job.watch.is_content():
            break  # what is tiled is not planned any more
        program = tile(c.unfused, int(limit_bytes * widening), gpu_attention(c))
        if program is c.unfused:
            break  # all kernels are within this limit
        ways = (whole, *(t for t, _ in found))
        if found and limit_bytes > largest_bytes and _some_fits(ways, c.machine, largest_bytes):
            break  # no budget could use larger tiles; where nothing fits, these may need less
        if is_same(program, finer):
            continue  # its tiles are within a finer limit, too
        finer = program
        if _kernel_count(program, gpu_attention(c)) > MAX_TILED_KERNELS:
            continue
        tiled = _graphed(ImportedNetwork(c.job, program, c.library, c.narrow), to_graph, progress)
        if tiled is None:
            continue
        c = replace(c, library=tiled.library)
        pins = carried_pins(whole.graph, whole.pins, tiled.graph)
        if pins is not None and leaves_caches_whole(tiled.graph, whole.graph):
            found.append((Tiling(tiled.graph, pins, limit_bytes), tiled))
    return c, found


def _graphed(network: ImportedNetwork, to_graph: ToGraph, progress: Progress) -> GraphedNetwork | None:
    """The graph of a tiling; None if it cuts caches that are stored in rows of integers."""
    try:
        graphed = to_graph(network, progress)
    except UnstorableCacheError:
        graphed = None
    progress.stage("tile")  # again, after the stages of the tiling
    return graphed


def _widening(graph: Graph) -> float:
    """Bytes of tensors before fusion, where all floats have 32 bits, over those that they have in memory."""
    stored = sum(tensor.size_bytes for tensor in graph.tensors)
    narrow = sum(tensor.size_bytes for tensor in graph.tensors if tensor.dtype in NARROW)
    return (stored + narrow) / stored if stored else 1.0


def _kernel_count(program: Program, suits: Suits) -> int:
    """How many kernels `fuse` will make of a program."""
    return sum(not group.is_view for group in kernel_groups(program, suits))
