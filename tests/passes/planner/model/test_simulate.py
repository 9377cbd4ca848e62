"""Predicted runs of decisions, against cases worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.residency import host_bytes_of, residency_of
from hybridc.passes.planner.model.simulate import EventKind, SimulatedRun, simulate
from tests.support.planner_problems import ProblemBuilder, all_on_gpu

Row = tuple[str, int, float, float]


def rows(outcome: SimulatedRun) -> list[Row]:
    return [(event.kind.value, event.index, event.start_us, event.end_us) for event in outcome.events]


def test_a_chain_on_the_gpu_fetches_its_input_and_offloads_its_output() -> None:
    build = ProblemBuilder()
    x = build.input(4)
    a = build.kernel(x, size=3, gpu_us=10)
    b = build.kernel(a, size=2, gpu_us=5)
    problem = build.problem(100, wanted=(b,))
    outcome = simulate(problem, all_on_gpu(problem, keep=True))
    assert rows(outcome) == [
        ("fetch", x, 0, 4),
        ("run_gpu", 0, 4, 14),
        ("run_gpu", 1, 14, 19),
        ("offload", b, 19, 21),
    ]
    assert outcome.makespan_us == 21
    assert outcome.peak_gpu_bytes == 7  # x and a
    assert outcome.feasible


def test_a_streamed_weight_is_fetched_while_an_earlier_kernel_runs() -> None:
    build = ProblemBuilder()
    x, w = build.input(4), build.weight(6)
    a = build.kernel(x, size=3, gpu_us=10)
    build.kernel(a, w, size=2, gpu_us=5)
    problem = build.problem(13)
    outcome = simulate(problem, Decisions((False, False), (False, False, True)))
    # both fetches are in the window of the first kernel: 4 + 3 bytes, and 6 that are there early
    assert rows(outcome) == [
        ("fetch", x, 0, 4),
        ("run_gpu", 0, 4, 14),
        ("fetch", w, 4, 10),
        ("run_gpu", 1, 14, 19),
    ]
    assert outcome.peak_gpu_bytes == 13


def test_a_fetch_waits_for_memory() -> None:
    build = ProblemBuilder()
    x, w = build.input(4), build.weight(6)
    a = build.kernel(x, size=3, gpu_us=10)
    build.kernel(a, w, size=2, gpu_us=5)
    problem = build.problem(12)  # one byte less than x, a and w at once
    outcome = simulate(problem, Decisions((False, False), (False, False, True)))
    assert rows(outcome) == [
        ("fetch", x, 0, 4),
        ("run_gpu", 0, 4, 14),
        ("fetch", w, 14, 20),
        ("run_gpu", 1, 20, 25),
    ]


def test_a_pinned_weight_holds_its_bytes_during_the_whole_run_and_is_not_copied() -> None:
    build = ProblemBuilder()
    x, w = build.input(4), build.weight(6)
    a = build.kernel(x, size=3, gpu_us=10)
    b = build.kernel(a, w, size=2, gpu_us=5)
    c = build.kernel(b, w, size=2, gpu_us=5)
    build.kernel(c, size=20, gpu_us=5)
    problem = build.problem(28)
    outcome = simulate(problem, all_on_gpu(problem, keep=True))
    assert [event.index for event in outcome.events if event.kind is EventKind.FETCH] == [x]
    assert outcome.peak_gpu_bytes == 28  # the last kernel's 22, and w though nobody reads it any more
    assert not simulate(build.problem(27), all_on_gpu(problem, keep=True)).feasible


def test_a_weight_pinned_for_kernels_on_the_cpu_alone_holds_nothing() -> None:
    build = ProblemBuilder()
    build.kernel(build.weight(6), size=3, gpu_us=10, cpu_us=7)
    outcome = simulate(build.problem(1), Decisions((True,), (True,)))
    assert (outcome.makespan_us, outcome.peak_gpu_bytes) == (7, 0)


def test_a_kernel_waits_until_the_offload_of_what_left_has_made_room() -> None:
    build = ProblemBuilder()
    x = build.input(1)
    a = build.kernel(x, size=8, gpu_us=10)
    b = build.kernel(a, size=1, gpu_us=3)
    build.kernel(b, size=8, gpu_us=5)
    problem = build.problem(10, wanted=(a,))
    outcome = simulate(problem, all_on_gpu(problem, keep=True))
    # the copy of a takes 11 to 19; until then the last kernel's 9 bytes do not fit beside it
    assert rows(outcome) == [
        ("fetch", x, 0, 1),
        ("run_gpu", 0, 1, 11),
        ("offload", a, 11, 19),
        ("run_gpu", 1, 11, 14),
        ("run_gpu", 2, 19, 24),
    ]
    ample = simulate(build.problem(17, wanted=(a,)), all_on_gpu(problem, keep=True))
    assert ample.makespan_us == 19


def test_a_branch_on_the_cpu_runs_beside_the_gpu_and_its_result_is_fetched() -> None:
    build = ProblemBuilder()
    x = build.input(2)
    a = build.kernel(x, size=3, gpu_us=10)
    b = build.kernel(a, size=1, gpu_us=20)
    c = build.kernel(a, size=4, gpu_us=10, cpu_us=9)
    build.kernel(b, c, size=1, gpu_us=5)
    problem = build.problem(100)
    # gaps: x for a; a for b; a for c; b; c
    outcome = simulate(problem, Decisions((False, False, True, False), (False, True, False, True, False)))
    assert rows(outcome) == [
        ("fetch", x, 0, 2),
        ("run_gpu", 0, 2, 12),
        ("offload", a, 12, 15),
        ("run_gpu", 1, 12, 32),
        ("run_cpu", 2, 15, 24),
        ("fetch", c, 24, 28),
        ("run_gpu", 3, 32, 37),
    ]


def test_a_tensor_offloaded_between_its_uses_is_fetched_again_once_it_has_left() -> None:
    build = ProblemBuilder()
    x = build.input(1)
    a = build.kernel(x, size=5, gpu_us=10)
    b = build.kernel(a, size=1, gpu_us=10)
    c = build.kernel(b, size=1, gpu_us=10)
    build.kernel(a, c, size=1, gpu_us=10)
    problem = build.problem(100)
    keep = tuple(gap.start >= 0 and (gap.tensor, gap.end) != (a, 3) for gap in problem.gaps)
    outcome = simulate(problem, Decisions((False,) * 4, keep))
    # on the host from 16 on; its stay for b ends with b at 21, so it comes back in the window of c
    assert ("offload", a, 11, 16) in rows(outcome)
    assert ("fetch", a, 21, 26) in rows(outcome)
    assert outcome.makespan_us == 41


def test_a_fetch_that_waits_for_the_cpu_is_overtaken_by_one_that_can_start() -> None:
    build = ProblemBuilder()
    x, v, w = build.input(2), build.weight(4), build.weight(4)
    a = build.kernel(x, size=2, gpu_us=1, cpu_us=20)
    b = build.kernel(a, v, size=2, gpu_us=10)
    build.kernel(b, w, size=2, gpu_us=10)
    problem = build.problem(100)
    outcome = simulate(problem, Decisions((True, False, False), tuple(g.tensor == b for g in problem.gaps)))
    # while a's result is made, both weights come; it itself is fetched at 20
    assert [row for row in rows(outcome) if row[0] == "fetch"] == [
        ("fetch", v, 0, 4),
        ("fetch", w, 4, 8),
        ("fetch", a, 20, 22),
    ]
    assert outcome.makespan_us == 42


def test_an_output_takes_the_bytes_of_an_input_that_leaves() -> None:
    build = ProblemBuilder()
    x = build.input(4)
    a = build.kernel(x, size=6, gpu_us=10)
    b = build.kernel(a, size=6, gpu_us=10, overwrites=a)
    problem = build.problem(10)
    assert simulate(problem, all_on_gpu(problem, keep=True)).peak_gpu_bytes == 10
    # not where the input is copied to the host, or read again
    assert not simulate(build.problem(11, wanted=(a,)), all_on_gpu(problem, keep=True)).feasible
    build.kernel(a, b, size=0, gpu_us=1)
    read_again = build.problem(11)
    assert not simulate(read_again, all_on_gpu(read_again, keep=True)).feasible


def test_a_tensor_kept_for_no_later_use_on_the_gpu_leaves_with_its_last_one() -> None:
    build = ProblemBuilder()
    x = build.input(1)
    a = build.kernel(x, size=8, gpu_us=1)
    b = build.kernel(x, size=8, gpu_us=1)
    build.kernel(a, b, size=1, gpu_us=1, cpu_us=1)
    problem = build.problem(9)
    keep = tuple(gap.start >= 0 for gap in problem.gaps)
    assert simulate(problem, Decisions((False, True, True), keep)).feasible
    on_gpu = simulate(build.problem(17), Decisions((False, False, True), keep))
    assert on_gpu.peak_gpu_bytes == 9  # a is not held while b runs


def test_a_tensor_kept_over_a_use_on_the_cpu_is_copied_there_and_stays() -> None:
    build = ProblemBuilder()
    x = build.input(1)
    a = build.kernel(x, size=8, gpu_us=1)
    build.kernel(a, size=2, gpu_us=1, cpu_us=3)
    build.kernel(a, size=1, gpu_us=2)
    problem = build.problem(9)
    outcome = simulate(problem, Decisions((False, True, False), (False, True, True)))
    assert rows(outcome) == [
        ("fetch", x, 0, 1),
        ("run_gpu", 0, 1, 2),
        ("offload", a, 2, 10),
        ("run_gpu", 2, 2, 4),
        ("run_cpu", 1, 10, 13),
    ]


def test_kernels_run_where_they_can() -> None:
    build = ProblemBuilder()
    a = build.kernel(build.input(2), size=2, gpu_us=math.inf, cpu_us=7)
    build.kernel(a, size=2, gpu_us=5, cpu_us=math.inf)
    outcome = simulate(build.problem(10), Decisions((False, True), (False, False)))
    assert [event.kind for event in outcome.events] == [EventKind.RUN_CPU, EventKind.FETCH, EventKind.RUN_GPU]


def test_a_working_set_beyond_the_budget_is_infeasible() -> None:
    build = ProblemBuilder()
    build.kernel(build.input(2), size=2, gpu_us=1, workspace=7)
    assert simulate(build.problem(11), Decisions((False,), (False,))).feasible
    outcome = simulate(build.problem(10), Decisions((False,), (False,)))
    assert (outcome.feasible, outcome.makespan_us, outcome.events) == (False, math.inf, ())


def test_no_kernels_take_no_time() -> None:
    assert simulate(ProblemBuilder().problem(0), Decisions((), ())) == SimulatedRun(True, 0, 0, ())


def test_the_host_holds_what_it_reads_until_then_and_results_to_the_end() -> None:
    build = ProblemBuilder()
    x, w = build.input(4), build.weight(50)
    a = build.kernel(x, w, size=3, gpu_us=10)  # on the GPU, copied to the host for b
    b = build.kernel(a, size=2, gpu_us=5, cpu_workspace=7)  # on the CPU
    c = build.kernel(b, size=8, gpu_us=5)  # on the GPU
    d = build.kernel(c, size=1, gpu_us=5)
    problem = build.problem(100, wanted=(a, d))
    decisions = Decisions((False, True, False, False), (False,) * len(problem.gaps))
    residency = residency_of(problem, decisions)
    # c leaves the GPU between its making and its use, so that the host holds it, too
    assert host_bytes_of(problem, residency) == (4 + 3, 3 + 2 + 7, 3 + 2 + 8, 3 + 8 + 1)
    assert simulate(replace(problem, host_bytes=13), decisions).feasible
    assert not simulate(replace(problem, host_bytes=12), decisions).feasible
