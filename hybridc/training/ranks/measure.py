"""Measures the network between ranks, as their sums use it."""

from __future__ import annotations

import time

import numpy as np

from hybridc.machine import Network
from hybridc.training.ranks.exchange import Ranks

_LARGE_BYTES, _REPEATS = 4 << 20, 20
_LEAST_US, _DIGITS = 1e-3, 4


def measure_network(ranks: Ranks) -> Network:
    """Of messages that all ranks send to all others at once. Collective; raises as `Ranks.exchange`.

    What the slowest rank sees counts, of the repetition that was disturbed least.
    """
    others = ranks.count - 1

    def exchange_us(size_bytes: int) -> float:
        own = np.zeros(size_bytes, np.uint8)
        room = [np.empty(size_bytes, np.uint8) for _ in range(ranks.count)]
        found = []
        for _ in range(_REPEATS):
            ranks.gather(None)  # so that all begin at once
            start = time.perf_counter()
            ranks.exchange([own] * ranks.count, room)
            found.append((time.perf_counter() - start) * 1e6)
        return min(map(max, zip(*ranks.gather(found), strict=True)))

    def rounded(value: float) -> float:
        return float(f"{value:.{_DIGITS}g}")

    small_us, large_us = map(exchange_us, (1, _LARGE_BYTES))
    gb_s = others * _LARGE_BYTES / max(large_us - small_us, _LEAST_US) / 1e3
    return Network(rounded(max(small_us / others, _LEAST_US)), rounded(gb_s))
