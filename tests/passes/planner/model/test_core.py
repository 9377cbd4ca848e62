"""The compiled core against the reference, and what repair and annealing promise."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.machine import load_machine
from hybridc.passes.planner.model import core as core_module
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem, problem_of
from hybridc.passes.planner.model.simulate import EventKind, simulate
from tests.support.planner_graphs import bert, random_dag
from tests.support.planner_problems import (
    ProblemBuilder,
    all_on_gpu,
    decisions,
    hosted,
    problems,
    problems_with_repeats,
    shared,
)
from tests.support.random_examples import random_examples


def half_budget(problem: Problem) -> Problem:
    """The problem with half the bytes that it takes entirely on the GPU."""
    ample = replace(problem, budget_bytes=1 << 60)
    peak_bytes = simulate(ample, all_on_gpu(ample, keep=True)).peak_gpu_bytes
    return replace(problem, budget_bytes=peak_bytes // 2)


@given(st.data())
@random_examples(200)
def test_core_agrees_with_the_reference_to_the_last_bit(data: st.DataObject) -> None:
    problem = data.draw(shared(hosted(problems() | problems_with_repeats())))
    core = Core(problem)
    for _ in range(3):
        point = data.draw(decisions(problem))
        outcome = simulate(problem, point)
        assert core.measure(point) == (outcome.makespan_us, outcome.peak_gpu_bytes)


@given(st.data())
@random_examples(60)
def test_one_like_another_has_the_times_of_its_own_kernels(data: st.DataObject) -> None:
    problem = data.draw(problems())
    first = Core(problem)
    times_us = [tuple(2 * us + 1 for us in of) for of in (problem.gpu_us, problem.cpu_us)]
    other = replace(problem, gpu_us=times_us[0], cpu_us=times_us[1])
    like = Core(Core(other, first).problem, Core(other, first))  # also of one that is like another
    chosen = data.draw(decisions(problem))
    del first
    assert like.measure(chosen) == Core(other).measure(chosen)


@given(st.data())
@random_examples(60)
def test_annealing_is_feasible_deterministic_and_never_slower_than_its_start(data: st.DataObject) -> None:
    problem = data.draw(shared(hosted(problems() | problems_with_repeats())))
    core = Core(problem)
    start = core.repaired(data.draw(decisions(problem)))
    if start is None:
        return
    found, makespan_us = core.anneal(start, 200, 1)
    assert makespan_us <= core.makespan_us(start) < math.inf
    assert simulate(problem, found).makespan_us == makespan_us
    assert Core(problem).anneal(start, 200, 1) == (found, makespan_us)


@given(st.data())
@random_examples(60)
def test_repair_leaves_what_fits_as_it_is(data: st.DataObject) -> None:
    problem = data.draw(hosted(problems() | problems_with_repeats()))
    point = data.draw(decisions(problem))
    repaired = Core(problem).repaired(point)
    if simulate(problem, point).feasible:
        assert repaired is not None
        assert simulate(problem, repaired) == simulate(problem, point)


def test_repair_gives_up_a_kept_gap_before_it_moves_a_kernel() -> None:
    build = ProblemBuilder()
    x, w = build.input(1), build.weight(6)
    a = build.kernel(x, size=8, gpu_us=1)
    build.kernel(a, w, size=1, gpu_us=1)
    problem = build.problem(15)  # x, a and the next kernel's w take one byte less than this
    assert Core(problem).repaired(all_on_gpu(problem, keep=True)) == all_on_gpu(problem, keep=True)
    narrow = build.problem(15 - 1)
    assert Core(narrow).repaired(all_on_gpu(narrow, keep=True)) == Decisions(
        (False, True), (False, False, False)
    )


def test_repair_moves_a_kernel_that_cannot_fit_to_the_cpu() -> None:
    build = ProblemBuilder()
    build.kernel(build.input(5), size=5, gpu_us=1)
    assert Core(build.problem(9)).repaired(Decisions((False,), (False,))) == Decisions((True,), (False,))


def test_where_nothing_fits_there_are_no_decisions() -> None:
    build = ProblemBuilder()
    build.kernel(build.input(5), size=5, gpu_us=1, cpu_us=math.inf)
    core = Core(build.problem(9))
    assert core.repaired(Decisions((False,), (False,))) is None
    with pytest.raises(ValueError, match="no decisions fit"):
        core.anneal(Decisions((False,), (False,)), 100, 1)


@pytest.mark.parametrize("seed", range(4))
def test_annealing_finds_the_optimum_of_a_small_graph(seed: int) -> None:
    problem = half_budget(problem_of(random_dag(seed, kernels=4), load_machine(), 0))
    core = Core(problem)
    points = product((False, True), repeat=4 + len(problem.gaps))
    best_us = min(core.makespan_us(Decisions(p[:4], p[4:])) for p in points)
    start = all_on_gpu(problem, keep=False)
    assert core.anneal(start, 5000, 1)[1] == best_us


def test_annealing_makes_a_real_network_much_faster() -> None:
    problem = half_budget(problem_of(bert(layers=2), load_machine(), 0))
    core = Core(problem)
    start = core.repaired(all_on_gpu(problem, keep=True))
    assert start is not None
    assert core.anneal(start, 3000, 1)[1] < 0.7 * core.makespan_us(start)


def test_annealing_chooses_well_among_layers_that_are_alike() -> None:
    # the budget is used up and a kernel takes long: which layers are where changes by exchanges alone
    build = ProblemBuilder()
    value = build.input(1)
    for _ in range(10):
        value = build.kernel(value, build.weight(10), size=1, gpu_us=5, cpu_us=40)
    problem = build.problem(34)
    core = Core(problem)
    first = Decisions(
        tuple(k >= 5 for k in range(10)), tuple(g.tensor in problem.inputs[0] for g in problem.gaps)
    )
    ways = (Decisions(tuple(c), first.keep) for c in product((False, True), repeat=10))
    assert core.anneal(first, 4000, 1)[1] <= min(map(core.makespan_us, ways))


def test_decisions_about_another_problem_are_refused() -> None:
    with pytest.raises(ValueError, match="another problem"):
        Core(ProblemBuilder().problem(9)).makespan_us(Decisions((False,), (False,)))


def test_annealing_ends_once_it_is_fast_enough() -> None:
    problem = half_budget(problem_of(bert(layers=2), load_machine(), 0))
    core, start = Core(problem), all_on_gpu(problem, keep=True)
    best_us = core.anneal(start, 3000, 1)[1]
    assert best_us < core.anneal(start, 3000, 1, enough_us=1.2 * best_us)[1] <= 1.2 * best_us


def test_several_searches_work_side_by_side() -> None:
    cases = [half_budget(problem_of(random_dag(seed), load_machine(), 0)) for seed in range(4)]

    def search(problem: Problem) -> tuple[Decisions, float]:
        return Core(problem).anneal(all_on_gpu(problem, keep=True), 2000, 1)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(search, cases)) == list(map(search, cases))


def test_without_a_compiler_the_reference_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "build_library", lambda source, name: None)
    problem = half_budget(problem_of(random_dag(1), load_machine(), 0))
    core, start = Core(problem), all_on_gpu(problem, keep=True)
    assert core.makespan_us(start) == math.inf
    repaired = core.repaired(start)
    assert repaired is not None
    assert core.makespan_us(repaired) == simulate(problem, repaired).makespan_us < math.inf
    assert core.anneal(start, 100, 1) == (repaired, core.makespan_us(repaired))


@given(st.data())
@random_examples(80)
def test_tidying_copies_no_more_and_stays_within_its_limit(data: st.DataObject) -> None:
    problem = data.draw(shared(hosted(problems() | problems_with_repeats())))
    core = Core(problem)
    start = core.repaired(data.draw(decisions(problem)))
    if start is None:
        return
    limit_us = core.makespan_us(start) * data.draw(st.sampled_from([1.0, 1.1]))
    tidy, makespan_us = core.tidied(start, limit_us)
    assert makespan_us == simulate(problem, tidy).makespan_us <= limit_us
    assert copied_bytes(problem, tidy) <= copied_bytes(problem, start)


def copied_bytes(problem: Problem, point: Decisions) -> int:
    copies = (EventKind.FETCH, EventKind.OFFLOAD)
    return sum(problem.size_bytes[e.index] for e in simulate(problem, point).events if e.kind in copies)


def test_with_memory_for_all_nothing_is_left_to_copy_but_inputs_and_outputs() -> None:
    problem = replace(problem_of(bert(layers=1), load_machine(), 0), budget_bytes=1 << 40)
    core = Core(problem)
    streamed = all_on_gpu(problem, keep=False)
    kept = all_on_gpu(problem, keep=True)
    assert core.tidied(streamed, core.makespan_us(streamed))[0] == kept
    assert copied_bytes(problem, kept) < 0.01 * copied_bytes(problem, streamed)
