"""Bounds from linear programmes hold whatever the solver did."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest

from hybridc.passes.planner.bounds.linear import LinearProgramme, lagrange_bound, minimise


def knapsack(seed: int, count: int = 8) -> tuple[LinearProgramme, list[int], float]:
    """A random knapsack, its variables, and the best whole solution by brute force."""
    random = Random(seed)
    values = [random.uniform(1, 9) for _ in range(count)]
    sizes = [random.uniform(1, 9) for _ in range(count)]
    room = sum(sizes) * 0.4
    lp = LinearProgramme()
    variables = [lp.variable(0, 1, -value) for value in values]
    lp.at_most(zip(variables, sizes, strict=True), room)
    best = min(
        -float(np.dot(values, choice))
        for choice in product((0, 1), repeat=count)
        if np.dot(sizes, choice) <= room
    )
    return lp, variables, best


def test_optimum_and_its_bound_agree() -> None:
    lp = LinearProgramme()
    x, y = lp.variable(0, 10, 2.0), lp.variable(0, 10, 3.0)
    lp.at_least([(x, 1.0), (y, 1.0)], 4.0)
    lp.at_most([(x, 1.0)], 3.0)
    for method in ("simplex", "ipm"):
        found = minimise(lp, method=method)
        assert found.is_optimal
        assert found.bound == pytest.approx(9.0, rel=1e-6)
        assert found.bound <= 9.0
        assert found.values == pytest.approx([3.0, 1.0], abs=1e-5)


def test_a_repeated_variable_counts_twice() -> None:
    lp = LinearProgramme()
    x = lp.variable(0, 10, 1.0)
    lp.at_least([(x, 1.0), (x, 1.0)], 4.0)
    assert minimise(lp).bound == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(20))
def test_any_multipliers_give_a_bound(seed: int) -> None:
    lp, _, _ = knapsack(seed)
    optimum = minimise(lp).bound
    generator = np.random.default_rng(seed)
    for scale in (0.1, 1.0, 100.0):
        multipliers = generator.normal(scale=scale, size=len(lp.row_lower))
        assert lagrange_bound(lp, multipliers) <= optimum + 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_few_iterations_give_a_bound_that_is_no_better(seed: int) -> None:
    lp, _, best = knapsack(seed)
    assert minimise(lp, iterations=1).bound <= minimise(lp).bound + 1e-9 <= best + 2e-9


@pytest.mark.parametrize("seed", range(10))
def test_whole_variables_tighten_the_bound(seed: int) -> None:
    lp, variables, best = knapsack(seed)
    whole = minimise(lp, integers=variables, nodes=1000).bound
    assert minimise(lp).bound - 1e-6 <= whole <= best
    assert whole == pytest.approx(best, rel=1e-3)


def test_no_variables_cost_nothing() -> None:
    assert minimise(LinearProgramme()).bound == 0.0
