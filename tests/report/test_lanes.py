"""How busy lanes are, and how much of the copies kernels hide: by hand."""

from __future__ import annotations

from hybridc.ir import Copy, Device, Graph, Kernel, Lane, Plan, Role, Run, Step, Tensor
from hybridc.passes.planner.emit.timeline import timeline
from hybridc.report.lanes import hidden_copy_us, lane_rows

GPU, CPU = Device.GPU, Device.CPU


def plan(*timed: tuple[Step, float]) -> Plan:
    steps, times_us = tuple(step for step, _ in timed), tuple(us for _, us in timed)
    return Plan(steps, (), (), None, times_us, timeline(steps, times_us)[0])


def graph() -> Graph:
    tensors = tuple(Tensor(name, (100,), "float32", Role.ACTIVATION) for name in "xyz")
    kernels = (Kernel("k", "f", ("x",), ("y",)), Kernel("l", "f", ("y",), ("z",)))
    return Graph(kernels, tensors, ("x",), ("z",))


def test_copy_behind_which_nothing_runs_is_not_hidden() -> None:
    assert hidden_copy_us(plan((Copy("x", CPU, GPU), 5.0), (Run("k", GPU, (0,)), 7.0))) == (5.0, 0.0)


def test_copy_is_hidden_as_long_as_kernels_run_on_either_device() -> None:
    steps = ((Run("k", GPU), 4.0), (Run("l", CPU, (0,)), 2.0), (Copy("x", CPU, GPU), 10.0))
    assert hidden_copy_us(plan(*steps)) == (10.0, 6.0)


def test_time_that_both_devices_are_busy_counts_once() -> None:
    steps = (
        (Run("k", GPU), 4.0),
        (Run("l", CPU), 3.0),
        (Copy("x", CPU, GPU), 3.0),
        (Copy("y", GPU, CPU), 9.0),
    )
    assert hidden_copy_us(plan(*steps)) == (12.0, 3.0 + 4.0)


def test_plan_without_copies_has_no_copy_time() -> None:
    assert hidden_copy_us(plan((Run("k", CPU), 1.0))) == (0.0, 0.0)


def test_lanes_count_steps_time_and_bytes() -> None:
    steps = ((Copy("x", CPU, GPU), 5.0), (Run("k", GPU, (0,)), 5.0), (Copy("x", CPU, GPU), 5.0))
    rows = {row.lane: row for row in lane_rows(graph(), plan(*steps))}
    assert set(rows) == {Lane.GPU, Lane.H2D}
    assert (rows[Lane.H2D].steps, rows[Lane.H2D].busy_us, rows[Lane.H2D].copied_bytes) == (2, 10.0, 800)
    assert (rows[Lane.GPU].share, rows[Lane.GPU].copied_bytes) == (0.5, 0)


def test_run_that_takes_no_time_has_no_shares() -> None:
    assert lane_rows(graph(), plan((Run("k", CPU), 0.0)))[0].share == 0
