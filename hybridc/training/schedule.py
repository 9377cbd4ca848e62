"""Learning rates: constant, by steps, along a cosine, each with a linear warm-up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridc.errors import UsageError
from hybridc.passes.training.spec import call_to_text, parse_call


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate of every step, as a multiple of the optimizer's own."""

    kind: str = "constant"
    """`constant`, `step` or `cosine`."""
    every: float = 30.0
    """Epochs between two reductions of `step`."""
    factor: float = 0.1
    """What `step` multiplies by."""
    end: float = 0.0
    """What `cosine` ends at."""
    warmup: float = 0.0
    """Epochs in which the rate rises linearly to its full value."""

    def factor_at(self, step: int, steps_per_epoch: int, epochs: int) -> float:
        """Of step `step`, counted from 0. The warm-up comes before, not on top of, what follows."""
        warmup_steps = round(self.warmup * steps_per_epoch)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = step - warmup_steps
        if self.kind == "step":
            return float(self.factor ** int(done / (self.every * steps_per_epoch)))
        if self.kind == "cosine":
            share = min(done / max(epochs * steps_per_epoch - warmup_steps, 1), 1.0)
            return self.end + (1.0 - self.end) * (1.0 + math.cos(math.pi * share)) / 2.0
        return 1.0


_OPTIONS = {
    "constant": ("warmup",),
    "step": ("every", "factor", "warmup"),
    "cosine": ("end", "warmup"),
}


def parse_schedule(text: str) -> Schedule:
    """Read `constant`, `step:every=10,factor=0.1` or `cosine:warmup=2`. Raises UsageError HC570."""
    kind, options = parse_call(text, "learning rate schedule", _OPTIONS)
    schedule = Schedule(kind, **options)
    if schedule.every <= 0 or schedule.warmup < 0:
        remedy = "for example step:every=10,factor=0.1,warmup=1; every and warmup count epochs"
        raise UsageError("HC570", f"{text!r} is not a learning rate schedule", remedy=remedy)
    return schedule


def schedule_to_text(schedule: Schedule) -> str:
    """What `parse_schedule` reads as this schedule."""
    return call_to_text(schedule.kind, schedule, _OPTIONS)
