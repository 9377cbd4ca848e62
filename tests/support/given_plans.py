"""Compile a model by a plan that a test makes, through all the other stages of the compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from hybridc.ir import Graph, Plan
from hybridc.machine import Machine
from hybridc.passes import pipeline
from hybridc.passes.pipeline import Compilation, Stage
from hybridc.progress import Progress


@contextmanager
def planned_by(make: Callable[[Graph, Machine], Plan]) -> Iterator[None]:
    """Within it the compiler verifies and lowers what `make` plans, whatever its own planner says."""

    def run(compilation: Compilation, _: Progress) -> Compilation:
        assert compilation.graph is not None
        return replace(compilation, plans=(make(compilation.graph, compilation.machine),))

    names = [stage.name for stage in pipeline.STAGES]
    at = names.index("verify")
    given = Stage("given", run, pipeline.STAGES[at - 1].show)
    with mock.patch.object(pipeline, "STAGES", (*pipeline.STAGES[:at], given, *pipeline.STAGES[at:])):
        yield
