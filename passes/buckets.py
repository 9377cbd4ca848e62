"""One network compiled for several buckets of sizes: what the buckets share, and all of them as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import numpy as np

from hybridc.ir import Buffer, Device, Plan
from hybridc.ir.plan import align
from hybridc.ir.residents import held_bytes, is_resident_weight, moved, side_by_side
from hybridc.ir.verify import verify
from hybridc.options import Budget, CompileOptions
from hybridc.passes.lower.lower import lower
from hybridc.passes.phases import ImportedNetwork, LoweredNetwork, PlannedNetwork, TiledNetwork
from hybridc.targets import Target

Planned = TypeVar("Planned", bound=PlannedNetwork)


def after(network: ImportedNetwork, larger: Sequence[PlannedNetwork]) -> ImportedNetwork:
    """The network as one bucket behind those that are planned, the last of which comes first.

    It takes functions and their times from the last one's library, and adds to it; its weights are its own,
    as folding may make others of one name for other sizes. Its kernels are cut up to what those of larger
    sizes are in their plans, for the same budgets: to try all ways takes most of a compilation for a GPU.
    Products in two parts are those of larger sizes, too, so that all read the same weights.
    """
    if not larger:
        return network
    limits = {tiling.limit_bytes for each in larger for tiling in each.chosen if tiling.is_cut_up}
    cut = next((tiling.cut for each in larger for tiling in each.tilings if tiling.cut is not None), None)
    job = replace(network.job, tile_limits=tuple(sorted(limits)), cut=cut)
    return replace(network, job=job, library=replace(larger[0].library, weights={}))


def _same_arrays(
    weights: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The weights, with another bucket's array in place of an equal one of the same name."""

    def shared(name: str, own: np.ndarray) -> np.ndarray:
        other = others.get(name)
        if other is None or other.dtype != own.dtype:
            return own
        is_same = own.__array_interface__ == other.__array_interface__  # else all elements are looked at
        return other if is_same or np.array_equal(other, own) else own

    return {name: shared(name, own) for name, own in weights.items()}


def weights_of(networks: Sequence[PlannedNetwork]) -> tuple[Mapping[str, np.ndarray], ...]:
    """The weights of each bucket, of which those that are the same are the same array."""
    *_, last = networks
    largest = last.library.weights
    return tuple(_same_arrays(network.library.weights, largest) for network in networks)


def with_shared_effort(options: CompileOptions, count: int) -> CompileOptions:
    """The options of one of so many buckets, which take what one compilation may take together."""
    tune_seconds = None if options.tune_seconds is None else options.tune_seconds / count
    return replace(options, plan_seconds=options.plan_seconds / count, tune_seconds=tune_seconds)


def with_budgets(options: CompileOptions, planned: Sequence[TiledNetwork]) -> CompileOptions:
    """The options of one more network behind those that are planned, if there are any: the bytes that their
    budgets are, and no folder for the IR."""
    if not planned:
        return options
    budgets = tuple(Budget(size_bytes=size) for size in planned[0].budgets)
    return replace(options, dump_ir=None, gpu_memory=budgets if options.gpu_memory else ())


def with_agreeing_residents(networks: Sequence[Planned]) -> list[Planned]:
    """The networks of all buckets, in whose plans for a budget resident weights lie at the same places.

    A weight that is resident in some plans has a *home*, bytes at the bottom of all arenas, where each of the
    others has room for it: there it stays while other plans run. The other ones lie behind, those first that
    more plans have. Requires: verified plans. Ensures: plans are verified, and no arena is larger than the
    largest was. A single network is left as it is.
    """
    if len(networks) == 1:
        return list(networks)
    columns = [_agreeing(plans) for plans in zip(*(each.plans for each in networks), strict=True)]
    made = [
        replace(network, plans=plans)
        for network, plans in zip(networks, zip(*columns, strict=True), strict=True)
    ]
    for network in made:
        for graph, plan in zip(network.graphs, network.plans, strict=True):
            verify(graph, plan)
    return made


_Weight = tuple[str, int]
"""Name and bytes."""


def _agreeing(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    found = [
        {(each.tensor, each.size_bytes): each for each in filter(is_resident_weight, plan.buffers)}
        for plan in plans
    ]
    count = Counter(weight for residents in found for weight in residents)
    order = sorted(count, key=lambda weight: (-count[weight], -weight[1], weight[0]))
    homes = _homes(plans, found, order)
    return tuple(
        _at_home(plan, residents, order, homes) if plan.arena_bytes(Device.GPU) else plan
        for plan, residents in zip(plans, found, strict=True)
    )


def _homes(
    plans: Sequence[Plan], found: Sequence[Mapping[_Weight, Buffer]], order: Sequence[_Weight]
) -> dict[_Weight, int]:
    """Offsets of the weights that every plan has, or has room for."""
    arenas = [plan.arena_bytes(Device.GPU) for plan in plans]
    room = [max(arenas) - each for each in arenas]
    homes: dict[_Weight, int] = {}
    end_bytes = 0
    for weight in order:
        size_bytes = align(weight[1])
        without = [i for i, residents in enumerate(found) if weight not in residents and arenas[i]]
        if all(room[i] >= size_bytes for i in without):
            for i in without:
                room[i] -= size_bytes
            homes[weight] = end_bytes
            end_bytes += size_bytes
    return homes


def _at_home(
    plan: Plan, residents: Mapping[_Weight, Buffer], order: Sequence[_Weight], homes: Mapping[_Weight, int]
) -> Plan:
    home_bytes = sum(align(size_bytes) for _, size_bytes in homes)
    others = [residents[weight] for weight in order if weight in residents and weight not in homes]
    offsets = side_by_side(others, home_bytes) | {
        name: offset for (name, size), offset in homes.items() if (name, size) in residents
    }
    more_bytes = sum(align(weight[1]) for weight in homes if weight not in residents)
    arenas = (
        replace(each, size_bytes=each.size_bytes + more_bytes) if each.device is Device.GPU else each
        for each in plan.arenas
    )
    buffers = moved(plan, offsets, home_bytes + held_bytes(others))
    return replace(plan, buffers=buffers, arenas=tuple(arenas))


def joined(networks: Sequence[PlannedNetwork], target: Target) -> LoweredNetwork:
    """The plans of all buckets and instruction sets, with one module of their functions for the target.

    Requires: the library of the first network has the functions of all. Ensures: `whole` is that of the last,
    with these functions.
    """
    *_, last = networks
    library = replace(networks[0].library, weights=last.library.weights)
    job = replace(last.job, options=replace(last.job.options, target=target))
    whole = replace(last.whole, job=job, library=library)
    chosen = tuple(chain.from_iterable(network.chosen for network in networks))
    plans = tuple(chain.from_iterable(network.plans for network in networks))
    graphs = [tiling.graph for tiling in chosen]
    lowered = lower(graphs, plans, library.scheduled, target)
    return LoweredNetwork(whole, last.tilings, last.all_gpu_peak_bytes, chosen, plans, last.planning, lowered)
