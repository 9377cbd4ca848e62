"""How far a result may be from its reference, and how far it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridc.options import FP32

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Tolerance:
    """An element passes if `|found - expected| <= atol + rtol * |expected|`, as in `numpy.allclose`."""

    rtol: float
    atol: float | None = None
    """None: as much of its output's largest value as `share` says, but at least `least`."""
    share: float = 0.0
    least: float = 0.0

    def atol_of(self, expected: np.ndarray) -> float:
        """The absolute tolerance of an output."""
        if self.atol is not None:
            return self.atol
        return max(self.share * (largest(expected) or 1.0), self.least)


FLOATS = Tolerance(rtol=5e-5, share=5e-5, least=1e-6)
"""Ten times what deep networks are off, 5e-6 of the largest value. Where all values are next to nothing, they
are what is left of terms of about one, rounded to 1e-7 each."""
HALVES = Tolerance(rtol=5e-3, share=5e-3, least=1e-5)
"""Where outputs, or the caches of a decoder, are 16-bit floats, which are themselves rounded to 1e-3
(float16) or 8e-3 (bfloat16)."""
REDUCED = Tolerance(rtol=2e-2, share=2e-2, least=1e-5)
"""Of `--precision`: bf16 has 8 bits, a layer may be off by 1 % (`--rounding-error`), and int8 by a step."""


def default_tolerance(
    outputs: Iterable[np.ndarray], precision: str = FP32, kv_cache: str | None = None
) -> Tolerance:
    """What passes unless the user says otherwise."""
    if precision != FP32:
        return REDUCED
    if kv_cache is not None:
        return HALVES
    halves = any(array.dtype.kind in "fV" and array.dtype.itemsize == 2 for array in outputs)
    return HALVES if halves else FLOATS


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one output is from its reference."""

    output: str
    max_abs: float
    max_rel: float
    """`max_abs` over the largest finite value of the reference."""
    elements: int = 0
    elements_off: int = 0
    """Elements that are further off than the tolerance."""


def deviation(
    output: str, actual: np.ndarray, expected: np.ndarray, tolerance: Tolerance = FLOATS
) -> Deviation:
    """Compare one output. Values agree where both are NaN or the same infinity.

    An output of another shape is infinitely far.
    """
    import numpy as np

    if actual.shape != expected.shape:
        return Deviation(output, np.inf, np.inf, expected.size, expected.size or 1)
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.where((a == e) | (np.isnan(a) & np.isnan(e)), 0.0, np.abs(a - e))
        distance = np.nan_to_num(distance, nan=np.inf, posinf=np.inf)
        allowed = tolerance.atol_of(expected) + tolerance.rtol * np.where(np.isfinite(e), np.abs(e), 0.0)
    max_abs, scale = float(np.max(distance, initial=0.0)), largest(e)
    max_rel = max_abs / scale if scale > 0 else max_abs
    return Deviation(output, max_abs, max_rel, a.size, int(np.count_nonzero(distance > allowed)))


def largest(values: np.ndarray) -> float:
    """The largest finite magnitude; 0 if there is none."""
    import numpy as np

    floats = values.astype(np.float64)
    return float(np.max(np.abs(floats[np.isfinite(floats)]), initial=0.0))
