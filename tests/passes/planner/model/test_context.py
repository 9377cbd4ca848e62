"""Effort: how it is divided among searches."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hybridc.passes.planner.model.context import Effort


def test_more_effort_begins_with_the_searches_of_less() -> None:
    efforts = [Effort(seconds) for seconds in (2, 3, 5, 9.9, 10, 20, 60, 600, 1e4)]
    for less, more in pairwise(effort.rungs for effort in efforts):
        assert more[: len(less)] == less


@pytest.mark.parametrize("seconds", [0.02, 1, 3, 10, 60])
def test_searches_take_no_longer_than_what_they_share(seconds: float) -> None:
    assert 0 < sum(rung.seconds for rung in Effort(seconds).rungs) <= seconds


def test_tilings_are_compared_alike_from_the_usual_effort_on() -> None:
    assert Effort(10).comparing == Effort(60).comparing == Effort(10)
    assert Effort(2).comparing == Effort(2)


@pytest.mark.parametrize("seconds", [0.1, 1.0, 5.0, 50.0])
def test_kernels_of_larger_graphs_have_fewer_simulations_each_but_not_far_fewer(seconds: float) -> None:
    kernels = (10, 50, 100, 200, 500, 1000, 4000)
    simulations = [Effort(seconds).evaluations(count) for count in kernels]
    each = [found / count for found, count in zip(simulations, kernels, strict=True)]
    assert each == sorted(each, reverse=True)
    more = [Effort(2 * seconds).evaluations(count) for count in kernels]
    assert all(once <= twice <= 2 * once + 1 for once, twice in zip(simulations, more, strict=True))


def test_usual_effort_is_spent_to_the_last_second() -> None:
    assert sum(rung.seconds for rung in Effort().rungs) == Effort().seconds
