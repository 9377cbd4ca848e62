"""Caches: tensors of which a run replaces some rows, and which lie where they are from run to run.

What touches a cache runs where it lies: on the CPU beside the host's memory, or on the GPU, which then holds
it all the time. Anything else would copy the past in each run. Caches that one kernel touches, as attention
does keys and values, lie together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from hybridc.ir import Device, Graph
from hybridc.ir.plan import align
from hybridc.passes.planner.model.pins import Pins


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Caches that lie together."""

    pairs: tuple[tuple[str, str], ...]
    """Old and new value of each."""
    kernels: tuple[int, ...]
    """Positions of those that touch them, in order."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for pair in self.pairs for name in pair)

    def size_bytes(self, graph: Graph) -> int:
        """What they hold of a device's memory."""
        return sum(align(graph.tensor[old].size_bytes) for old, _ in self.pairs)

    def devices(self, graph: Graph, pins: Pins) -> frozenset[Device]:
        """Where they may lie: all that touches them has code there, and is not pinned elsewhere."""
        kernels = [graph.kernels[position] for position in self.kernels]
        return frozenset(
            device
            for device in Device
            if all(device in k.devices and pins.get(k.name, device) is device for k in kernels)
        )

    def is_second(self, graph: Graph, second: Set[str]) -> bool:
        """Whether only kernels that are meant for the CPU, by name, touch them."""
        return all(graph.kernels[position].name in second for position in self.kernels)

    def pins(self, graph: Graph, device: Device) -> dict[str, Device]:
        """That have all that touches them run on a device."""
        return {graph.kernels[position].name: device for position in self.kernels}


def cache_groups(graph: Graph) -> tuple[CacheGroup, ...]:
    """The caches of a graph, in the order in which they are needed first."""
    found: list[tuple[list[tuple[str, str]], set[int]]] = []
    for pair in graph.caches:
        users = {graph.producer[pair[1]], *(reader for name in pair for reader in graph.consumers[name])}
        together = [each for each in found if not users.isdisjoint(each[1])]
        found = [each for each in found if users.isdisjoint(each[1])]
        pairs = [p for each in together for p in each[0]]
        found.append(([*pairs, pair], users.union(*(each[1] for each in together))))
    groups = (CacheGroup(tuple(pairs), tuple(sorted(users))) for pairs, users in found)
    return tuple(sorted(groups, key=lambda group: group.kernels))


def with_caches_on_host(graph: Graph, pins: Pins) -> Pins:
    """The user's pins, and those that leave caches on the host which may lie there."""
    added: dict[str, Device] = {}
    for group in cache_groups(graph):
        where = group.devices(graph, pins)
        if Device.CPU in where:
            added |= group.pins(graph, Device.CPU)
        elif Device.GPU in where:  # all of it, if some has to
            added |= group.pins(graph, Device.GPU)
    return {**added, **pins}


def leaves_caches_whole(graph: Graph, whole: Graph) -> bool:
    """Whether what touches the caches of a network is the same in another graph of it, or they are in parts.

    If it is cut up there and the caches are not, each part reads a copy of its slice.
    """
    if graph.parts:
        in_parts = {old for pair in graph.parts for old in pair}.intersection(graph.inputs)
        return 2 * (len(graph.caches) - len(whole.caches)) == len(in_parts)
    return list(_touching(graph)) == list(_touching(whole))


def _touching(graph: Graph) -> Iterator[Sequence[str]]:
    for group in cache_groups(graph):
        yield [graph.kernels[position].function for position in group.kernels]
