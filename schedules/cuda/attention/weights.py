"""Weights of scores as powers of two, relative to the greatest score so far: Milakov and Gimelshein, "Online
normalizer calculation for softmax" (2018)."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cpu.reduction.softmax import LOG2_E

LOWEST = tirx.FloatImm("float32", -3.4028234663852886e38)
"""What a maximum begins with. Not -inf: keys that are all masked would give inf - inf."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How scores become weights."""

    unit: float
    """By which differences of scores are multiplied to be exponents of two."""
    is_scaled_only: bool
    """Whether scores are multiplied by a number and nothing else, which is in `unit` then: such scores need
    no step of their own in front of their maximum."""

    @staticmethod
    def of(found: AttentionBlocks) -> Weights:
        factor = found.factor_of_scores
        # larger factors could make an infinity of the lowest maximum
        if factor is not None and 0 < factor * LOG2_E <= 1:
            return Weights(factor * LOG2_E, True)
        return Weights(LOG2_E, False)

    def weight(self, score: ir.Expr, peak: ir.Expr) -> ir.Expr:
        """At most 1."""
        if self.is_scaled_only:
            # one multiply-add
            return tirx.exp2(score * self._unit - peak * self._unit)
        # scores of a mask may be too large to be multiplied first
        return self.shrunk(score, peak)

    def shrunk(self, peak: ir.Expr, top: ir.Expr) -> ir.Expr:
        """What sums relative to `peak` are to be multiplied by to be relative to `top`."""
        return tirx.exp2((peak - top) * self._unit)

    @property
    def _unit(self) -> tirx.FloatImm:
        return tirx.FloatImm("float32", self.unit)
