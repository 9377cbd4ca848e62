"""Which tensors may take more bytes without a network that needs more."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

SMALL_BYTES = 64 * 1024
"""Of a tensor in float32 whose bytes take no time: a core's second-level cache holds it several times, and a
GPU of 130 GB/s writes it in half a microsecond, a tenth of a launch."""

T = TypeVar("T", bound=Hashable)


def affordable(
    touched: Sequence[Collection[T]],
    weight_bytes: Sequence[int],
    nbytes: Mapping[T, int],
    more: Mapping[T, int],
) -> frozenset[T]:
    """Those of `more` that can be that many bytes larger.

    `touched` are the tensors that each kernel reads and writes, in the order of a run, `weight_bytes` what it
    reads of weights. Neither of two needs grows: of the kernel with the most bytes, which the smallest budget
    has to hold, and of all tensors that are live at once. Between kernels a tensor is live from its first to
    its last. As a kernel may write its result over an operand, only what is live between two kernels counts
    for what is needed, and for what is added both.
    """
    span: dict[T, tuple[int, int]] = {}
    for at, tensors in enumerate(touched):
        for tensor in tensors:
            span[tensor] = span.get(tensor, (at, at))[0], at
    live, between = np.zeros(len(touched), np.int64), np.zeros(len(touched) + 1, np.int64)
    for tensor, (first, last) in span.items():
        live[first : last + 1] += nbytes[tensor]
        between[first + 1 : last + 1] += nbytes[tensor]
    used = np.array(weight_bytes, np.int64) + [sum(nbytes[t] for t in set(tensors)) for tensors in touched]
    most_live, most_used = between.max(), used.max(initial=0)
    users: dict[T, list[int]] = {tensor: [] for tensor in more}
    for at, tensors in enumerate(touched):
        for tensor in set(tensors) & more.keys():
            users[tensor].append(at)
    found = set[T]()
    for tensor, added in more.items():
        first, last = span[tensor]
        if (live[first : last + 1] + added > most_live).any() or (
            used[users[tensor]] + added > most_used
        ).any():
            continue
        live[first : last + 1] += added
        used[users[tensor]] += added
        found.add(tensor)
    return frozenset(found)
