"""Tensors that may be larger where a network needs no more bytes for that."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from hybridc.passes.precision.small_tensors import affordable


def needs(touched: Sequence[set[int]], weights: Sequence[int], nbytes: Mapping[int, int]) -> tuple[int, int]:
    """Of the largest kernel, and between two kernels, by counting tensor after tensor."""
    used = max(w + sum(nbytes[t] for t in tensors) for tensors, w in zip(touched, weights, strict=True))
    live = 0
    for at in range(1, len(touched)):
        before, behind = set().union(*touched[:at]), set().union(*touched[at:])
        live = max(live, sum(nbytes[t] for t in before & behind))
    return used, live


@pytest.mark.parametrize("seed", range(20))
def test_a_network_needs_no_more(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 12)
    touched = [{at, *draw.sample(range(at), min(at, draw.randint(0, 3)))} for at in range(count)]
    weights = [draw.choice((0, 0, 50)) for _ in touched]
    nbytes = {tensor: draw.randint(1, 40) for tensor in range(count)}
    more = {tensor: nbytes[tensor] for tensor in range(count) if draw.random() < 0.7}
    found = affordable(touched, weights, nbytes, more)
    larger = {tensor: size + (more[tensor] if tensor in found else 0) for tensor, size in nbytes.items()}
    used, live = needs(touched, weights, nbytes)
    used_then, live_then = needs(touched, weights, larger)
    assert found <= more.keys() and used_then <= used and live_then <= live


def test_only_what_is_live_with_the_most_stays_as_it_is() -> None:
    touched = [{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4}]
    nbytes = {0: 50, 1: 50, 2: 100, 3: 10, 4: 10}
    assert affordable(touched, [0] * 5, nbytes, {1: 1, 3: 10, 4: 10}) == {4}
    assert affordable(touched, [0] * 5, nbytes, {2: 1}) == frozenset()


def test_the_weights_of_a_kernel_count_for_it_alone() -> None:
    touched, nbytes = [{0, 1}, {1, 2}, {2, 3}, {3, 4}], {0: 5, 1: 5, 2: 5, 3: 90, 4: 5}
    assert affordable(touched, [0, 0, 0, 0], nbytes, {1: 5, 2: 5}) == {1}
    assert affordable(touched, [0, 500, 0, 0], nbytes, {1: 5, 2: 5}) == frozenset()
