"""A session whose artifact takes turns with others in one arena of the GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from hybridc.artifact.load import Artifact
from hybridc.ir import Lane
from hybridc.runtime.memory import Memory
from hybridc.runtime.plan_view import PlanView
from hybridc.runtime.program import LoadedProgram
from hybridc.runtime.session import Session


@dataclass(slots=True)
class Turns:
    """What the sessions of a group know of each other."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held during each run of any member."""
    holder: object = None
    """The program that ran last, all of whose weights are on the GPU; None where a run has failed."""


class MemberSession(Session):
    """A session of a member of a group.

    Its memory and turns are those of the group, so a run waits until those of other members have ended.
    """

    def __init__(
        self, first: Artifact, again: Artifact, reserve: Callable[[], Memory], turns: Turns, threads: int
    ) -> None:
        """With the plans of the first run of a turn, and of further ones."""
        self._turns = turns
        self._first = PlanView(first)
        self._open(again, (again,), reserve, threads, turns.lock)

    def _load_program(self, memory: Memory, view: PlanView) -> LoadedProgram:
        first = LoadedProgram(memory, self._first.artifact, self._first.binding, self._threads)
        try:
            return _TurnProgram(memory, view, self._threads, first, self._turns)
        except BaseException:
            first.close()
            raise

    def _hold(self, memory: Memory, view: PlanView) -> None:
        """Weights that always stay; the others come with the first run of a turn."""
        super()._hold(memory, self._first)


class _TurnProgram(LoadedProgram):
    """Runs `first` in place of the plan itself if another member has run since, or the last run failed."""

    def __init__(
        self, memory: Memory, view: PlanView, threads: int, first: LoadedProgram, turns: Turns
    ) -> None:
        super().__init__(memory, view.artifact, view.binding, threads)
        self._first, self._turns = first, turns

    def run(self) -> None:
        has_weights, self._turns.holder = self._turns.holder is self, None
        if has_weights:
            super().run()
        else:
            self._first.run()
        self._turns.holder = self

    def run_traced(self) -> dict[Lane, list[tuple[float, float]]]:
        """Of a run that finds its weights there."""
        if self._turns.holder is not self:
            self.run()
        return super().run_traced()

    def close(self) -> None:
        if self._turns.holder is self:
            self._turns.holder = None
        self._first.close()
        super().close()
