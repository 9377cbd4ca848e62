"""What is done to a proven schedule before it is a plan."""

from __future__ import annotations

from hybridc.passes.planner.model.simulate import Event, EventKind, SimulatedRun
from hybridc.passes.planner.search.proof import without_idle_offloads
from tests.support.planner_problems import ProblemBuilder


def test_copies_to_the_host_that_nothing_reads_are_left_out() -> None:
    build = ProblemBuilder()
    idle = build.kernel(build.input(1), size=2, gpu_us=5)
    read = build.kernel(idle, size=2, gpu_us=5)
    fetched = build.kernel(read, size=2, gpu_us=5)
    wanted = build.kernel(fetched, read, size=2, gpu_us=5)
    problem = build.problem(100, wanted=(wanted,))
    offloads = [Event(EventKind.OFFLOAD, t, 10.0 * t, 10.0 * t + 2) for t in (idle, read, fetched, wanted)]
    others = (Event(EventKind.FETCH, fetched, 60.0, 62.0, 3), Event(EventKind.RUN_CPU, 2, 70.0, 75.0))
    outcome = without_idle_offloads(problem, SimulatedRun(True, 100.0, 50, (*offloads, *others)))
    assert outcome == SimulatedRun(True, 100.0, 50, (*offloads[1:], *others))
