"""Compile a model by a plan that a test makes, through all the other stages of the compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from hybridc.ir import Graph, Plan
from hybridc.machine import Machine
from hybridc.passes import pipeline
from hybridc.passes.phases import PlannedNetwork
from hybridc.passes.sequence import Stage
from hybridc.passes.stages.show import show_plans
from hybridc.progress import Progress
from tests.support.stages import stages_with


@contextmanager
def planned_by(make: Callable[[Graph, Machine], Plan]) -> Iterator[None]:
    """Within it the compiler verifies and lowers what `make` plans, whatever its own planner says."""

    def run(network: PlannedNetwork, _: Progress) -> PlannedNetwork:
        return replace(network, plans=(make(network.whole.graph, network.machine),))

    given = Stage("given", run, show_plans)
    with mock.patch.object(pipeline, "STAGES", stages_with(given, after="plan")):
        yield
