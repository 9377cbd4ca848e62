"""The states of a training step: where their present values are, and copies of them as the user has them.

Where no GPU takes part, most live in the arena of the step's session, which puts new values where the old
ones were. With a GPU, those that the plan keeps there stay in its memory as long as only steps are made: they
are fetched when somebody asks for them, or another program needs the memory. All others are on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from hybridc.artifact.manifest import Manifest
from hybridc.errors import DeviceError, UsageError
from hybridc.passes.training.spec import AVERAGE, NEW
from hybridc.passes.training.splits import cut, joined
from hybridc.training.artifact import STEP, TrainingManifest
from hybridc.training.programs import Programs, Values


class States:
    """What lives from step to step, by name."""

    def __init__(
        self,
        programs: Programs,
        manifest: TrainingManifest,
        values: Mapping[str, np.ndarray],
        stepping: Mapping[str, Manifest],
    ) -> None:
        """`values` are the first ones, `stepping` is of the programs that make new ones.

        A step of several programs, which only ranks make, keeps all values on the host.
        """
        self._programs, self._manifest = programs, manifest
        self._values = dict(values)
        outputs = {port.name for program in stepping.values() for port in program.outputs}
        self._renewed = {s.name: s.name + NEW for s in manifest.states if s.name + NEW in outputs}
        is_alone = STEP in stepping
        self._placed = self._places() if is_alone else {}
        self._resident = programs[STEP].residents(self._renewed) if is_alone else frozenset()
        self._are_on_gpu = self._are_lost = False
        self.put(self._values)

    @property
    def values(self) -> Mapping[str, np.ndarray]:
        """Those on the host; what `step` has left on the GPU is there, and here of before."""
        return self._values

    def step(
        self, values: Values, made: Mapping[str, np.ndarray], draw: int
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Loss and results of the program, for `values` and what earlier parts of the batch have `made`.

        Afterwards residents are on the GPU alone. The results are still to be `put`.
        """
        self._check_not_lost()
        on_gpu = self._resident if self._are_on_gpu else frozenset()
        kept = (self._placed.keys() | on_gpu) - made.keys()
        left = self._placed.keys() | self._resident
        try:
            loss, results = self._programs.loss(
                STEP, {**self._values, **values, **made}, draw, kept=kept, left=left
            )
        except DeviceError:
            self._are_lost = self._are_on_gpu
            raise
        self._are_on_gpu = bool(self._resident)
        return loss, results

    def put(self, values: Mapping[str, np.ndarray]) -> None:
        """Make these the present values."""
        if not self._resident.isdisjoint(values):
            self.evict()
        for name, value in values.items():
            if name in self._placed:
                self._placed[name][...] = value
        self._values = {**self._values, **values, **self._placed}

    def evict(self) -> None:
        """Fetch what is on the GPU, whose memory another program takes."""
        self._fetch()
        self._are_on_gpu = False

    def close(self) -> None:
        """Fetch what is on the GPU, if it can be had."""
        with suppress(DeviceError, UsageError):  # a forked process has no GPU to fetch from
            self._fetch()
        self._are_on_gpu = False

    def averages(self) -> dict[str, np.ndarray]:
        """Moving averages by their parameters' names, of values that were fetched."""
        names = {name: f"{name}#{AVERAGE}" for name in self._renewed}
        return {name: self._values[average] for name, average in names.items() if average in self._renewed}

    def copies(self, *, is_of_model: bool) -> dict[str, np.ndarray]:
        """Of what the user has, whole: of the model, or of the optimizer."""
        self._fetch()
        kept = (s for s in self._manifest.states if s.kind != "sum" and s.is_of_model == is_of_model)
        return joined({state.name: self._values[state.name] for state in kept}, self._manifest.splits)

    def checked(self, values: Mapping[str, np.ndarray], *, is_of_model: bool) -> dict[str, np.ndarray]:
        """Copies of what the user gives whole, as the step has them. Raises UsageError HC576."""
        expected = {s.name: s for s in self._manifest.whole_states if s.is_of_model == is_of_model}
        different = sorted(set(expected).symmetric_difference(values))
        if different:
            which = "missing" if different[0] in expected else "unknown"
            raise refusal(f"the state {different[0]!r} is {which}")
        for name, old in expected.items():
            new = values[name]
            if new.shape != old.shape or new.dtype != old.dtype:
                found = f"{new.dtype}{list(new.shape)}"
                raise refusal(f"the state {name!r} is {found} instead of {old.dtype}{list(old.shape)}")
        return {name: np.array(value) for name, value in cut(values, self._manifest.splits).items()}

    def _places(self) -> dict[str, np.ndarray]:
        """Values that a step replaces where they are. With a GPU none: only one session may hold its memory,
        and the step's is closed at times."""
        session = self._programs[STEP]
        return {} if session.artifact.needs_gpu else session.places(self._renewed)

    def _fetch(self) -> None:
        """Make the values on the host the present ones. Raises DeviceError HC411 if they are lost."""
        self._check_not_lost()
        if self._are_on_gpu:
            session = self._programs[STEP]
            self._values = {**self._values, **{name: session.resident(name) for name in self._resident}}

    def _check_not_lost(self) -> None:
        if self._are_lost:
            what = "the GPU, which held the only copy of the parameters, failed in a step"
            raise DeviceError("HC411", what, remedy="load the artifact and the last checkpoint again")


def refusal(what: str) -> UsageError:
    """Of states that are not those of the step."""
    return UsageError("HC576", what, remedy="use the states of the same model, optimizer and frozen weights")
