"""How many random examples a property test draws."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

FAST_SHARE = 0.2
"""Of the examples, in the fast suite: it has ten minutes on two cores."""


def random_examples(count: int) -> settings:
    """The settings of a property test: a part of so many examples, always the same, in the fast suite; all of
    them, others each time, in `make test-full`."""
    if settings.get_current_profile_name() == "exploring":
        return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    fewer = max(round(count * FAST_SHARE), 3)
    return settings(
        max_examples=fewer, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
