"""Stages in sequence, each of which takes what the one before it made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from hybridc.errors import UsageError
from hybridc.progress import Progress

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Stage(Generic[A, B]):
    """A named step of the compiler. `show` gives what it made as text, and the suffix of its file."""

    name: str
    run: Callable[[A, Progress], B]
    show: Callable[[B], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class StageSequence(Generic[A, B]):
    """Stages that together make a B of an A."""

    stages: tuple[Stage[Any, Any], ...]

    @staticmethod
    def of(first: Stage[A, B]) -> StageSequence[A, B]:
        """The sequence of one stage."""
        return StageSequence((first,))

    def then(
        self, name: str, run: Callable[[B, Progress], C], show: Callable[[C], tuple[str, str]]
    ) -> StageSequence[A, C]:
        """This sequence with a stage after it."""
        return StageSequence((*self.stages, Stage(name, run, show)))

    def through(self, other: StageSequence[B, C]) -> StageSequence[A, C]:
        """This sequence and then another one."""
        return StageSequence((*self.stages, *other.stages))

    def until(self, name: str | None) -> StageSequence[A, Any]:
        """The stages up to and with the one of this name; all for None. Raises UsageError HC520."""
        if name is None:
            return self
        return StageSequence(self.stages[: self._position(name) + 1])

    def run(self, value: A, progress: Progress, *, dump_ir: Path | None = None) -> B:
        """Run the stages in order; write what each made to the folder `dump_ir`.

        Raises HybridcError; UsageError HC521 if `dump_ir` cannot be written.
        """
        made: Any = value
        for number, stage in enumerate(self.stages):
            progress.stage(stage.name)
            with np.errstate(all="ignore"):  # weights may overflow here as they would in a run: no warning
                made = stage.run(made, progress)
            if dump_ir is not None:
                _dump(dump_ir, number, stage, made)
        return made

    def _position(self, name: str) -> int:
        names = [stage.name for stage in self.stages]
        if name not in names:
            raise UsageError("HC520", f"there is no stage {name!r}", remedy=f"stages are {', '.join(names)}")
        return names.index(name)


def _dump(folder: Path, number: int, stage: Stage[Any, Any], made: Any) -> None:
    suffix, text = stage.show(made)
    path = folder / f"{number:02}_{stage.name}{suffix}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise UsageError(
            "HC521", f"cannot write {path}: {error.strerror}", remedy="name another --dump-ir folder"
        ) from error
