"""The choice of an option for each member, held against looking at all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from hybridc.group.choose import Option, choose, needed_bytes
from tests.support.random_examples import random_examples

sizes = st.integers(0, 6)
options = st.builds(Option, sizes, sizes, st.integers(0, 9).map(float), sizes)
members = st.lists(st.lists(options, min_size=1, max_size=5), min_size=1, max_size=4)


def chosen(options: Sequence[Sequence[Option]], positions: Sequence[int]) -> list[Option]:
    return [each[position] for each, position in zip(options, positions, strict=True)]


def cost(options: Sequence[Option]) -> tuple[float, int]:
    return math.fsum(option.us for option in options), sum(option.copied_bytes for option in options)


@random_examples(150)
@given(members, st.integers(0, 30))
def test_no_other_combination_that_fits_is_better(members: list[list[Option]], budget_bytes: int) -> None:
    fitting = [each for each in product(*members) if needed_bytes(each) <= budget_bytes]
    found = choose(members, budget_bytes)
    if found is None:
        assert not fitting
    else:
        assert needed_bytes(chosen(members, found)) <= budget_bytes
        assert cost(chosen(members, found)) == min(map(cost, fitting))


def test_the_last_byte_decides() -> None:
    ways = [[Option(0, 8, 9.0), Option(5, 3, 1.0)], [Option(0, 4, 9.0), Option(2, 2, 8.0)]]
    assert choose(ways, 9) == (1, 0)
    assert choose(ways, 10) == (1, 1)
    assert choose(ways, 8) == (0, 0)
    assert choose(ways, 7) is None


def test_of_equally_fast_ones_that_is_taken_which_copies_least() -> None:
    ways = [[Option(0, 5, 1.0, 4), Option(4, 1, 1.0, 0)], [Option(0, 5, 1.0)]]
    assert choose(ways, 9) == (1, 0)
    assert choose(ways, 8) == (0, 0)
