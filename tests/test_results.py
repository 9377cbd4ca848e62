"""What the API returns is one short line in a notebook."""

from __future__ import annotations

from pathlib import Path

from hybridc.machine import load_machine
from hybridc.results import Compiled, Planned
from tests.cli.conftest import MIB, small_graph, small_plan


def test_what_was_compiled_is_told_in_one_line() -> None:
    graph, plans = small_graph(), (small_plan(MIB), small_plan(2 * MIB))
    one = Compiled(Path("net.hyb"), plans[:1], (graph,))
    told = "2 kernels (1 cpu, 1 gpu), 512 B of GPU memory, predicted 10.0 us"
    assert repr(one) == f"<Compiled net.hyb: {told}>"
    assert repr(Compiled(Path("net.hyb"), plans, (graph,) * 2)) == (
        f"<Compiled net.hyb: 2 plans, the largest: {told}>"
    )
    assert repr(Compiled(None, (), ())) == "<Compiled: stopped before there was an artifact>"
    assert repr(graph) == "<Graph: 2 kernels, 3 tensors>"
    assert repr(plans[0]) == "<Plan: 4 steps, 512 bytes of GPU memory, predicted 10.0 us>"


def test_what_was_planned_is_told_in_one_line() -> None:
    planned = Planned((small_plan(None),), (small_graph(),), ({},), 0, 0, 0, load_machine())
    assert repr(planned).startswith("<Planned: 2 kernels (1 cpu, 1 gpu), ") and len(repr(planned)) < 100
