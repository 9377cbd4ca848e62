"""One network compiled for several CPU instruction sets: what these share, and all of them as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from tvm_ffi import structural_equal

from hybridc.ir import Device, Graph, Plan, Run
from hybridc.passes.lower.lower import llvm_target
from hybridc.passes.phases import ImportedNetwork, Library, PlannedNetwork
from hybridc.schedules.rule import Scheduled
from hybridc.targets import Isa

_Value = TypeVar("_Value")
_OfFunctions = Mapping[tuple[str, Device], _Value]
"""By name and device."""


def beside(network: ImportedNetwork, sets: Sequence[Sequence[PlannedNetwork]]) -> ImportedNetwork:
    """The network as it is compiled for one more instruction set, behind those of others, if there are any.

    Functions that compute the same have one name for all, so that the GPU's need not be there twice.
    """
    return replace(network, library=Library(table=sets[0][0].library.table)) if sets else network


def together(sets: Sequence[Sequence[PlannedNetwork]]) -> tuple[PlannedNetwork, ...]:
    """The networks of all buckets for each instruction set, one set after the other, each with the functions
    of all. Functions have the instruction set in their names, if there are several.

    Functions of kernels that run on the GPU alone keep their names where the first set has the same for them.
    Requires: the library of the first network of a set has the functions of the others.
    """
    if len(sets) == 1:
        return tuple(sets[0])
    on_gpu = {key: made for key, made in sets[0][0].library.scheduled.items() if key[1] is Device.GPU}
    networks = [network for each in sets for network in _told_apart(each, on_gpu)]
    libraries = [network.library for network in networks]
    library = replace(
        libraries[0],
        scheduled={key: made for each in libraries for key, made in each.scheduled.items()},
        measured_us={key: us for each in libraries for key, us in each.measured_us.items()},
        estimated_us={key: us for each in libraries for key, us in each.estimated_us.items()},
    )
    return tuple(_with_library(network, library) for network in networks)


def _told_apart(
    networks: Sequence[PlannedNetwork], on_gpu: _OfFunctions[Scheduled]
) -> Iterator[PlannedNetwork]:
    """The networks of one instruction set; `on_gpu` are the GPU's functions that need not be named anew."""
    library, isa = networks[0].library, networks[0].job.options.target.isa
    suffix = f"_{isa.name}"
    shared = {key[0] for key, made in on_gpu.items() if _is_same(made, library.scheduled.get(key))}

    def named(values: _OfFunctions[_Value]) -> dict[tuple[str, Device], _Value]:
        kept = {key: value for key, value in values.items() if key[0] in shared and key[1] is Device.GPU}
        return kept | {(f"{name}{suffix}", device): value for (name, device), value in values.items()}

    own = replace(
        library,
        scheduled=named({key: _for_cpu(key[1], made, isa) for key, made in library.scheduled.items()}),
        measured_us=named(library.measured_us),
        estimated_us=named(library.estimated_us),
    )
    for network in networks:
        chosen = tuple(
            replace(tiling, graph=_renamed(tiling.graph, plan, shared, suffix))
            for tiling, plan in zip(network.chosen, network.plans, strict=True)
        )
        yield _with_library(replace(network, chosen=chosen), own)


def _with_library(network: PlannedNetwork, library: Library) -> PlannedNetwork:
    """With these functions; the weights are its own."""
    whole = replace(network.whole, library=replace(library, weights=network.library.weights))
    return replace(network, whole=whole)


def _for_cpu(device: Device, made: Scheduled, isa: Isa) -> Scheduled:
    """With a note of the instruction set, which is not that of the whole library."""
    if device is Device.GPU:
        return made
    return replace(made, function=made.function.with_attr("target", llvm_target(isa)))


def _is_same(one: Scheduled, other: Scheduled | None) -> bool:
    return (
        other is not None
        and one.packings == other.packings
        and one.workspace_bytes == other.workspace_bytes
        and structural_equal(one.function, other.function)
    )


def _renamed(graph: Graph, plan: Plan, shared: Container[str], suffix: str) -> Graph:
    devices = defaultdict[str, set[Device]](set)
    for step in plan.steps:
        if isinstance(step, Run):
            devices[step.kernel].add(step.device)
    kernels = tuple(
        kernel
        if devices[kernel.name] == {Device.GPU} and kernel.function in shared
        else replace(kernel, function=f"{kernel.function}{suffix}")
        for kernel in graph.kernels
    )
    return replace(graph, kernels=kernels)
