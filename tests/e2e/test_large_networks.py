"""Networks of very many nodes, and of shapes on which naive fusion takes exponential time."""

from __future__ import annotations

import pytest

from hybridc.compiler import plan_model
from hybridc.ir.verify import verify
from hybridc.options import CompileOptions, parse_budgets
from hybridc.targets import parse_target
from tests.support.large_networks import NETWORKS


def plan(name: str, nodes: int, **options: object) -> int:
    """Plan a network; returns how many kernels it has."""
    planned = plan_model(NETWORKS[name](nodes), CompileOptions(**options))  # type: ignore[arg-type]
    for graph, made in zip(planned.graphs, planned.plans, strict=True):
        verify(graph, made)
    return len(planned.graphs[0].kernels)


@pytest.mark.parametrize("name", ["doublings", "fibonacci", "diamonds"])
def test_values_that_are_read_again_and_again_are_planned(name: str) -> None:
    # 2**240 paths lead from the input of `doublings` to its output
    assert plan(name, 240, target=parse_target("avx2")) >= 240 // 32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "doublings", "residual", "movements", "products", "reductions"])
def test_ten_thousand_nodes_are_planned(name: str) -> None:
    assert plan(name, 10_000, target=parse_target("avx2")) >= 10_000 // 32 - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "doublings", "residual"])
def test_two_thousand_nodes_are_planned_for_half_of_what_they_need(name: str) -> None:
    budgets = parse_budgets("50%")
    assert plan(name, 2_000, target=parse_target("cuda+avx2"), gpu_memory=budgets) >= 2_000 // 32 - 1
