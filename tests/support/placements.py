"""Steps of a placement that a test chooses."""

from __future__ import annotations

from collections.abc import Container, Sequence

from hybridc.ir import Copy, Device, Graph, Step
from hybridc.passes.planner.emit.insert_copies import insert_copies
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import problem_of
from hybridc.passes.planner.model.simulate import simulate
from tests.support.graphs import machine


def steps_of(
    graph: Graph, placement: Sequence[Device], given_up: Container[tuple[str, str]] = ()
) -> tuple[Step, ...]:
    """Steps of the simulated run with a device for each kernel, on a machine with more memory than enough.

    All that is on the GPU stays there while it is needed, but what is given up: (tensor, kernel that
    fetches it).
    """
    problem = problem_of(graph, machine(), 1 << 60)
    named = [(problem.tensor_names[gap.tensor], problem.kernel_names[gap.end]) for gap in problem.gaps]
    decisions = Decisions(
        tuple(device is Device.CPU for device in placement), tuple(use not in given_up for use in named)
    )
    return insert_copies(graph, problem, simulate(problem, decisions))


def names(steps: Sequence[Step]) -> list[str]:
    """`tensor>device` and `kernel@device`."""
    return [f"{s.tensor}>{s.target}" if isinstance(s, Copy) else f"{s.kernel}@{s.device}" for s in steps]
