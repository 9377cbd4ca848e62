"""Orders in which kernels can run, where the graph leaves it free."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from hybridc.ir import Graph, Role
from hybridc.ir.plan import align


def best_order(graph: Graph) -> tuple[int, ...]:
    """Positions of the graph's kernels in an order that needs few bytes: the graph's own, if none is better.

    Ensures: every kernel comes behind the kernels whose results it reads.
    """
    own = tuple(range(len(graph.kernels)))
    return min(own, frugal_order(graph), key=lambda order: peak_bytes(graph, order))


def frugal_order(graph: Graph) -> tuple[int, ...]:
    """Run next, of the kernels that can, the one that adds the fewest live bytes; the oldest of equals.

    The greedy list scheduling of OLLA's initial solutions (Steiner et al., arXiv 2210.12924).
    """
    sizes = _activation_bytes(graph)
    unread = {name: len(graph.consumers[name]) for name in sizes}
    missing = [sum(1 for name in set(k.reads) if name in graph.producer) for k in graph.kernels]
    order: list[int] = []
    done = [False] * len(graph.kernels)

    def added_bytes(position: int) -> int:
        kernel = graph.kernels[position]
        freed = sum(sizes[name] for name in set(kernel.reads) if name in sizes and unread[name] == 1)
        return sum(sizes.get(name, 0) for name in kernel.outputs) - freed

    # what a kernel adds falls over time, so entries are pushed again and old ones skipped
    ready = [(added_bytes(i), i) for i, count in enumerate(missing) if count == 0]
    heapify(ready)
    while ready:
        _, position = heappop(ready)
        if done[position]:
            continue  # it was there twice, since less is added once it is the last reader of something
        done[position] = True
        order.append(position)
        kernel = graph.kernels[position]
        for name in set(kernel.reads):
            if name in unread:
                unread[name] -= 1
                # its last reader frees the tensor now
                for reader in graph.consumers[name] if unread[name] == 1 else ():
                    if not done[reader] and missing[reader] == 0:
                        heappush(ready, (added_bytes(reader), reader))
        for name in kernel.outputs:
            for reader in graph.consumers[name]:
                missing[reader] -= 1
                if missing[reader] == 0:
                    heappush(ready, (added_bytes(reader), reader))
    return tuple(order)


def level_order(graph: Graph) -> tuple[int, ...]:
    """By the longest way from the inputs: branches, and bands of kernels that are cut up, side by side.

    It needs more bytes, but lets two devices share the kernels of a level.
    """
    level: list[int] = []
    for kernel in graph.kernels:
        before = (level[graph.producer[name]] for name in kernel.reads if name in graph.producer)
        level.append(1 + max(before, default=0))
    return tuple(sorted(range(len(level)), key=lambda i: (level[i], i)))


def renewing_order(graph: Graph) -> tuple[int, ...] | None:
    """`best_order`, but a loop-carried new value is computed when nobody reads the old one any more.

    So it may take the old one's bytes. What is computed for it alone, a gradient, is delayed with it. None
    where two values wait for each other.
    """
    base = best_order(graph)
    place = {position: step for step, position in enumerate(base)}
    before: list[set[int]] = [
        {graph.producer[name] for name in kernel.reads if name in graph.producer} for kernel in graph.kernels
    ]
    for old, new in graph.loop_carried:
        # the new value, and what nobody else reads, such as its gradient
        late = _computed_for(graph, graph.producer[new])
        for position in late:
            before[position].update(set(graph.consumers[old]) - late)
    after: list[list[int]] = [[] for _ in graph.kernels]
    for position, earlier in enumerate(before):
        for other in earlier:
            after[other].append(position)
    missing = [len(earlier) for earlier in before]
    ready = [(place[i], i) for i, count in enumerate(missing) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        _, position = heappop(ready)
        order.append(position)
        for other in after[position]:
            missing[other] -= 1
            if not missing[other]:
                heappush(ready, (place[other], other))
    # kernels that wait for each other never become ready
    return tuple(order) if len(order) == len(base) else None


def _computed_for(graph: Graph, position: int) -> set[int]:
    """A kernel, and those whose results nobody reads but these."""
    found, unseen = {position}, [position]
    while unseen:
        kernel = graph.kernels[unseen.pop()]
        for maker in {graph.producer[n] for n in kernel.reads if n in graph.producer} - found:
            outputs = graph.kernels[maker].outputs
            readers = {reader for name in outputs for reader in graph.consumers[name]}
            # read by these alone, and not wanted by the user
            if readers <= found and not set(outputs) & set(graph.outputs):
                found.add(maker)
                unseen.append(maker)
    return found


def peak_bytes(graph: Graph, order: tuple[int, ...]) -> int:
    """The most bytes of activations and workspace that are live at one kernel, all on one device."""
    sizes = _activation_bytes(graph)
    place = {position: step for step, position in enumerate(order)}
    # differences of live bytes from step to step; one entry more for what lives to the end
    change = [0] * (len(order) + 2)
    for name, size in sizes.items():
        uses = [place[reader] for reader in graph.consumers[name]]
        # an input that nobody has read yet need not be there
        first = place[graph.producer[name]] if name in graph.producer else min(uses, default=0)
        change[first] += size
        change[max(uses, default=first) + 1] -= size
    live = largest = 0
    for step, position in enumerate(order):
        live += change[step]
        # only one kernel runs at a time: workspaces do not add up
        largest = max(largest, live + align(graph.kernels[position].gpu_workspace_bytes))
    return largest


def _activation_bytes(graph: Graph) -> dict[str, int]:
    return {t.name: align(t.size_bytes) for t in graph.tensors if t.role is not Role.WEIGHT}
