"""A network that engines are compared on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx

TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Case:
    """Its model is built when it is wanted: some take gigabytes."""

    name: str
    build: Callable[[], onnx.ModelProto]
    targets: Mapping[str, str] = field(default_factory=dict)
    """By instruction set, a target other than its own, where that lacks the instructions."""
    tolerance: float = TOLERANCE
    """Largest difference between two engines' outputs, as a fraction of their scale."""


def even(rng: np.random.Generator, low: int, high: int, multiple: int = 1) -> int:
    """A multiple between two numbers, all orders of magnitude alike."""
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))) / multiple) * multiple
