"""Orders of kernels, and the bytes that they need."""

from __future__ import annotations

from hypothesis import given

from hybridc.ir import Graph, Role
from hybridc.passes.planner.model.order import best_order, frugal_order, level_order, peak_bytes
from tests.support.graphs import GraphBuilder, chain, graphs
from tests.support.random_examples import random_examples


def branches() -> Graph:
    """Four branches that each blow up and shrink: best one after the other, listed breadth first."""
    build = GraphBuilder(bytes_each=512)
    x = build.input("x", 1)
    wide = [build.kernel((x,), {f"wide{i}": 10}) for i in range(4)]
    thin = [build.kernel((value,), {f"thin{i}": 1}) for i, value in enumerate(wide)]
    return build.graph(build.kernel(tuple(thin), {"y": 1}))


def test_branches_run_one_after_the_other() -> None:
    graph = branches()
    assert frugal_order(graph) == best_order(graph) == (0, 4, 1, 5, 2, 6, 3, 7, 8)
    assert peak_bytes(graph, tuple(range(9))) == (4 * 10 + 1) * 512  # the first thin one beside all wide ones
    assert peak_bytes(graph, best_order(graph)) == (10 + 1 + 3) * 512


def test_own_order_stays_if_none_is_better() -> None:
    assert best_order(chain(5)) == (0, 1, 2, 3, 4)
    build = GraphBuilder()
    build.kernel((build.input("x", 1),), {"a": 2})
    build.kernel(("x",), {"b": 1})
    graph = build.graph(build.kernel(("a", "b"), {"y": 1}))
    assert frugal_order(graph) == (1, 0, 2)
    assert best_order(graph) == (0, 1, 2)


def test_levels_run_one_after_the_other() -> None:
    assert level_order(branches()) == (0, 1, 2, 3, 4, 5, 6, 7, 8)
    build = GraphBuilder()
    a = build.kernel((build.input("x", 1),), {"a": 1})
    b = build.kernel((a,), {"b": 1})
    c = build.kernel(("x",), {"c": 1})
    assert level_order(build.graph(build.kernel((b, c), {"y": 1}))) == (0, 2, 1, 3)


def test_bytes_of_a_chain_are_those_of_two_neighbours() -> None:
    graph = chain(4, size=4, weight=100)  # weights do not depend on the order
    assert peak_bytes(graph, (0, 1, 2, 3)) == 2 * 4 * 512


def test_workspace_and_tensors_that_nothing_reads_count_while_their_kernel_runs() -> None:
    build = GraphBuilder()
    a = build.kernel((build.input("x", 1),), {"a": 1, "unread": 5}, workspace=3)
    graph = build.graph(build.kernel((a,), {"y": 1}, workspace=7))
    assert peak_bytes(graph, (0, 1)) == max(1 + 1 + 5 + 3, 1 + 1 + 7) * 512


def test_graph_without_kernels_has_the_empty_order() -> None:
    build = GraphBuilder()
    assert best_order(build.graph(build.input("x", 1))) == ()


@random_examples(60)
@given(graphs())
def test_kernels_come_behind_those_whose_results_they_read(graph: Graph) -> None:
    for order in (frugal_order(graph), best_order(graph), level_order(graph)):
        assert sorted(order) == list(range(len(graph.kernels)))
        place = {position: step for step, position in enumerate(order)}
        for position, kernel in enumerate(graph.kernels):
            makers = [graph.producer[n] for n in kernel.inputs if n in graph.producer]
            assert all(place[maker] < place[position] for maker in makers)
    own = tuple(range(len(graph.kernels)))
    assert peak_bytes(graph, best_order(graph)) <= peak_bytes(graph, own)
    assert all(t.role is Role.WEIGHT or peak_bytes(graph, own) >= 0 for t in graph.tensors)
