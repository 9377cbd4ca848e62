"""One network compiled for several buckets of sizes: what the buckets share, and all of them as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from hybridc.options import Budget, CompileOptions
from hybridc.passes.lower.lower import lower
from hybridc.passes.phases import ImportedNetwork, LoweredNetwork, PlannedNetwork, TiledNetwork
from hybridc.targets import Target


def after(network: ImportedNetwork, larger: Sequence[PlannedNetwork]) -> ImportedNetwork:
    """The network as one bucket behind those that are planned, the last of which comes first.

    It takes functions and their times from the last one's library, and adds to it; its weights are its own,
    as folding may make others of one name for other sizes. Its kernels are cut up to what those of larger
    sizes are in their plans, for the same budgets: to try all ways takes most of a compilation for a GPU.
    """
    if not larger:
        return network
    limits = {tiling.limit_bytes for each in larger for tiling in each.chosen if tiling.is_cut_up}
    job = replace(network.job, tile_limits=tuple(sorted(limits)))
    return replace(network, job=job, library=replace(larger[0].library, weights={}))


def _same_arrays(
    weights: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The weights, with another bucket's array in place of an equal one of the same name."""

    def shared(name: str, own: np.ndarray) -> np.ndarray:
        other = others.get(name)
        if other is None or other.dtype != own.dtype or not np.array_equal(other, own):
            return own
        return other

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
