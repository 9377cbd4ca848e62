"""From the times of some kernels to the shares of peak and bandwidth that their families reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hybridc.machine import Efficiency

_LOG_SHARES = np.arange(math.log(1 / 512), math.log(8), math.log(2) / 32)
"""From 0.2 % to eight times: Winograd's algorithm does less work than is counted, and what only reads may be
faster than a copy."""
_LEAST_US = 1e-9
"""Stands for a time of nothing, which has no logarithm."""
_DRAWN_TOGETHER = 0.02
"""Weight of the two shares' distance beside the samples' misses: it decides where these say little."""
_LEAST_SHARE_OF_TIME = 0.1
"""What is left of a kernel's time without the launch: at least this share of it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A kernel that was timed; the first two times are what it would take at peak and at full bandwidth."""

    family: str
    compute_us: float
    memory_us: float
    measured_us: float
    """Without the launch."""


def sample(
    family: str,
    flops: int,
    bytes_moved: int,
    us: float,
    *,
    peak_gflops: float,
    bandwidth_gb_s: float,
    launch_us: float,
) -> Sample:
    """What one call's time says of a processor with these peaks."""
    own_us = max(us - launch_us, us * _LEAST_SHARE_OF_TIME)
    return Sample(family, flops / (peak_gflops * 1e3), bytes_moved / (bandwidth_gb_s * 1e3), own_us)


def efficiencies(samples: Iterable[Sample]) -> dict[str, Efficiency]:
    """By family, the two shares whose roofline comes closest to its samples."""
    by_family: dict[str, list[Sample]] = {}
    for one in samples:
        by_family.setdefault(one.family, []).append(one)
    return {family: _closest(own) for family, own in sorted(by_family.items())}


def _closest(samples: Sequence[Sample]) -> Efficiency:
    """Least squares of logarithms. Where the samples leave a share open, because the other one bounds them
    all, it takes after the other."""
    compute, memory = np.meshgrid(_LOG_SHARES, _LOG_SHARES, indexing="ij")
    error = _DRAWN_TOGETHER * (compute - memory) ** 2
    for s in samples:
        log_us = np.maximum(_log(s.compute_us) - compute, _log(s.memory_us) - memory)
        error += (log_us - _log(s.measured_us)) ** 2
    best = np.unravel_index(error.argmin(), error.shape)
    return Efficiency(round(math.exp(compute[best]), 3), round(math.exp(memory[best]), 3))


def _log(us: float) -> float:
    return math.log(max(us, _LEAST_US))
