"""The timeline of a plan, against cases worked out by hand."""

from __future__ import annotations

from hybridc.ir import Copy, Device, Run
from hybridc.passes.planner.emit.timeline import timeline

GPU, CPU = Device.GPU, Device.CPU


def test_lanes_run_side_by_side_and_waits_hold_back() -> None:
    steps = (Copy("x", CPU, GPU), Run("a", GPU), Run("b", GPU, (0,)), Copy("y", GPU, CPU, (1,)))
    makespan_us, spans = timeline(steps, (10, 3, 4, 20))
    assert spans == ((0, 10), (0, 3), (10, 14), (3, 23))
    assert makespan_us == 23


def test_what_is_listed_behind_a_cpu_kernel_runs_beside_it() -> None:
    makespan_us, spans = timeline((Run("a", CPU), Run("b", GPU), Copy("w", CPU, GPU)), (5, 1, 2))
    assert spans == ((0, 5), (0, 1), (0, 2))
    assert makespan_us == 5


def test_steps_of_one_lane_run_one_after_the_other() -> None:
    steps = (Run("a", CPU), Copy("a", CPU, GPU, (0,)), Copy("w", CPU, GPU), Run("b", CPU))
    assert timeline(steps, (5, 2, 3, 1))[1] == ((0, 5), (5, 7), (7, 10), (5, 6))


def test_copies_in_both_directions_do_not_hold_each_other_back() -> None:
    assert timeline((Copy("x", CPU, GPU), Copy("y", GPU, CPU)), (4, 3))[1] == ((0, 4), (0, 3))


def test_a_step_starts_at_the_end_of_the_latest_step_it_waits_for() -> None:
    steps = (Run("a", GPU), Run("b", CPU), Copy("c", CPU, GPU), Run("d", GPU, (1, 2)))
    assert timeline(steps, (1, 9, 4, 2))[1][3] == (9, 11)


def test_no_steps_take_no_time() -> None:
    assert timeline((), ()) == (0, ())
