"""Which kernels a run needs: what only one side of a choice reads is computed only if that side is taken.

A choice (`Kernel.choice`) needs one of two tensors, by a condition that data decide. A kernel whose results
are needed on one side alone gets a guard; so a run executes one branch of an If, and of a Loop the trips that
there are. Guards follow from who reads what, not from where a node stood in the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush

from hybridc.ir import Device, Graph, Guard, Kernel, Role

Guards = tuple[Guard, ...]


def with_guards(graph: Graph) -> Graph:
    """The graph with the guards of its kernels, in an order in which conditions come first.

    Requires: no guards yet.
    Ensures: each kernel has the guards under which somebody needs its results, those of outer choices first;
    what computes a condition runs on the CPU, as lanes look at conditions in the host's memory; what a
    guarded kernel checks is not checked before the run. The graph itself if it has no choices.
    Raises: nothing of its own.
    """
    if not any(kernel.choice for kernel in graph.kernels):
        return graph
    guards = _guards(graph)
    conditions = {guard.tensor for own in guards for guard in own}
    kernels = [
        _guarded(kernel, own, is_condition=not conditions.isdisjoint(kernel.outputs))
        for kernel, own in zip(graph.kernels, guards, strict=True)
    ]
    return _in_order(replace(graph, kernels=tuple(kernels)))


def _guarded(kernel: Kernel, guards: Guards, *, is_condition: bool) -> Kernel:
    devices = (Device.CPU,) if is_condition else kernel.devices
    checks = tuple(replace(check, tensor="") for check in kernel.checks) if guards else kernel.checks
    return replace(kernel, guards=guards, devices=devices, checks=checks)


def _guards(graph: Graph) -> list[Guards]:
    """Of each kernel the guards that all who need it have in common."""
    kept = {*graph.outputs, *(t.name for t in graph.tensors if t.role is Role.STATE)}
    needed: dict[str, Guards] = dict.fromkeys(kept, ())
    found: list[Guards] = []
    for kernel in reversed(graph.kernels):
        own = _common([needed[name] for name in kernel.outputs if name in needed])
        found.append(own)
        for name, guards in _demands(graph, kernel, own):
            needed[name] = _common([needed.get(name, guards), guards])
    return found[::-1]


def _demands(graph: Graph, kernel: Kernel, own: Guards) -> Iterator[tuple[str, Guards]]:
    """What a kernel with these guards reads, and when: of a choice each operand on its side only."""
    if not kernel.choice or not _is_on_host(graph, kernel.choice[0]):
        yield from ((name, own) for name in kernel.inputs)
        return
    condition, taken, other = kernel.choice
    yield condition, own
    yield taken, _also(own, Guard(condition, True))
    yield other, _also(own, Guard(condition, False))


def _is_on_host(graph: Graph, name: str) -> bool:
    """Whether a condition can be in the host's memory before anything that depends on it."""
    if graph.tensor[name].role is Role.WEIGHT:
        return False
    position = graph.producer.get(name)
    return position is None or Device.CPU in graph.kernels[position].devices


def _also(guards: Guards, guard: Guard) -> Guards:
    """A condition that is looked at already tells nothing new."""
    return guards if any(each.tensor == guard.tensor for each in guards) else (*guards, guard)


def _common(several: list[Guards]) -> Guards:
    """The guards with which all begin: where they differ, nobody may have computed a later condition."""
    if not several:
        return ()
    shortest = min(several, key=len)
    for length, guard in enumerate(shortest):
        if any(guards[length] != guard for guards in several):
            return shortest[:length]
    return shortest


def _in_order(graph: Graph) -> Graph:
    """Kernels behind the conditions of their guards, else as they stood.

    There is such an order: a condition is needed under fewer guards than what it decides about, and so is all
    that it is computed from; none of that has a guard of it.
    """
    missing = [sum(name in graph.producer for name in set(kernel.reads)) for kernel in graph.kernels]
    ready = [position for position, count in enumerate(missing) if not count]
    order: list[int] = []
    while ready:
        position = heappop(ready)
        order.append(position)
        for name in graph.kernels[position].outputs:
            for reader in graph.consumers[name]:
                missing[reader] -= 1
                if not missing[reader]:
                    heappush(ready, reader)
    assert len(order) == len(graph.kernels), "conditions and what they decide about wait for each other"
    return replace(graph, kernels=tuple(graph.kernels[position] for position in order))
