"""Where kernels may run again, and what decisions about them mean."""

from __future__ import annotations

import math
from dataclasses import replace

from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.rematerialize import (
    expand,
    recompute_instead_of_fetch,
    with_recompute_slots,
    with_repeats,
    without_recompute_slots,
    without_repeats,
)
from hybridc.passes.planner.model.residency import residency_of
from hybridc.passes.planner.model.simulate import EventKind, simulate
from tests.support.planner_problems import ProblemBuilder


def hourglass(saved_us: float = 1.0, between: int = 5, size: int = 50) -> Problem:
    """x -> a -> s, then a chain of small kernels, and one that reads the chain's end and s: all GPU kernels.

    The problem has tensors x, a, s, ... and kernels 0 (makes a), 1 (makes s), ...
    """
    build = ProblemBuilder()
    x = build.input(10)
    a = build.kernel(x, size=10, gpu_us=100, cpu_us=math.inf)
    saved = build.kernel(a, size=size, gpu_us=saved_us, cpu_us=math.inf)
    value = a
    for _ in range(between):
        value = build.kernel(value, size=10, gpu_us=10, cpu_us=math.inf)
    build.kernel(value, saved, size=10, gpu_us=10, cpu_us=math.inf)
    return build.problem(70)


def stands(problem: Problem) -> list[str]:
    return [f"{n}{'*' if k in problem.repeats else ''}" for k, n in enumerate(problem.kernel_names)]


def test_a_kernel_stands_again_before_a_late_use_of_what_it_makes_fast() -> None:
    assert stands(with_repeats(hourglass())) == ["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k1*", "k7"]


def test_chains_of_kernels_stand_again_where_what_they_read_is_far_too() -> None:
    problem = hourglass()
    cheap = replace(problem, gpu_us=(2.0, *problem.gpu_us[1:]))
    assert stands(with_repeats(cheap))[-4:] == ["k6", "k0*", "k1*", "k7"]


def test_nothing_stands_again_for_a_soon_use_or_at_a_high_price_or_without_gpu_code() -> None:
    slow = hourglass(saved_us=1000.0)
    soon = hourglass(between=2)
    once = hourglass()
    on_cpu = replace(once, gpu_us=(100.0, math.inf, *once.gpu_us[2:]), cpu_us=(1.0,) * once.kernel_count)
    for problem in (slow, soon, on_cpu):
        assert with_repeats(problem) == problem


def test_what_is_made_again_is_not_copied_and_holds_no_bytes_meanwhile() -> None:
    once = hourglass()
    wide = with_repeats(once)
    keep = tuple(gap.start >= 0 and gap.tensor != 2 for gap in once.gaps)
    fetched = with_recompute_slots(wide, once, Decisions((False,) * once.kernel_count, keep))
    assert (
        simulate(wide, fetched).makespan_us
        == simulate(once, without_recompute_slots(wide, once, fetched)).makespan_us
    )
    again = recompute_instead_of_fetch(wide, fetched)
    outcome = simulate(wide, again)
    assert [wide.kernel_names[e.index] for e in outcome.events if e.kind is EventKind.RUN_GPU][-2:] == [
        "k1",
        "k7",
    ]
    assert {e.index for e in outcome.events if e.kind is not EventKind.RUN_GPU} == {0, 1}  # x, and a for k1
    assert max(residency_of(wide, again).held_bytes[2:7]) == 20
    assert without_recompute_slots(wide, once, again) == Decisions((False,) * once.kernel_count, keep)


def test_an_input_is_kept_for_a_repeat_if_its_later_use_keeps_it() -> None:
    build = ProblemBuilder()
    x = build.input(10)
    a = build.kernel(x, size=10, gpu_us=10, cpu_us=math.inf)
    saved = build.kernel(a, size=50, gpu_us=1, cpu_us=math.inf)
    value = build.kernel(a, size=10, gpu_us=10, cpu_us=math.inf)
    for _ in range(4):
        value = build.kernel(value, size=10, gpu_us=10, cpu_us=math.inf)
    value = build.kernel(value, saved, size=10, gpu_us=10, cpu_us=math.inf)
    build.kernel(value, a, size=10, gpu_us=10, cpu_us=math.inf)
    once = build.problem(80)
    wide = expand(once, [(k, False) for k in range(7)] + [(1, True), (7, False), (8, False)])
    keep = tuple(gap.start >= 0 and gap.tensor != saved for gap in once.gaps)
    again = recompute_instead_of_fetch(
        wide, with_recompute_slots(wide, once, Decisions((False,) * once.kernel_count, keep))
    )
    outcome = simulate(wide, again)
    assert outcome.feasible and outcome.peak_gpu_bytes == 80
    assert [e.kind for e in outcome.events if e.kind is not EventKind.RUN_GPU] == [EventKind.FETCH]
    assert without_repeats(wide) == once
