"""What the options of a compilation ask of tuning, as the chooser that scheduling takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridc.errors import DeviceError
from hybridc.options import CompileOptions
from hybridc.passes.schedule import Tunable
from hybridc.progress import Progress
from hybridc.targets import Isa, missing_flags
from hybridc.tuning.measure import Measurer
from hybridc.tuning.record import default_path
from hybridc.tuning.search import Conditions, recorded_choices, search, this_processor
from hybridc.version import __version__


def tuner_of(options: CompileOptions, progress: Progress) -> Tuner | None:
    """What chooses tiles as the options ask for; None if they do not.

    Measurements are used only where a compilation asks for them, so that others stay reproducible. Raises
    DeviceError HC401 if there is to be measured what this processor cannot run.
    """
    if options.tune_seconds is None and options.tune_record is None:
        return None
    if options.tune_seconds is not None:
        _check_processor(options.target.isa)
    return Tuner(options, progress)


class Tuner:
    """Chooses tiles by measurements; `chosen` holds the labels that it took, by function."""

    def __init__(self, options: CompileOptions, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self._path = Path(options.tune_record or default_path())
        self.chosen: Mapping[str, str] = {}

    def __call__(self, tunables: Sequence[Tunable]) -> Mapping[str, str]:
        """Raises UsageError HC523 or HC524."""
        isa, threads = self._options.target.isa, self._options.cpu_threads
        conditions = Conditions(isa.name, threads, this_processor(), __version__)
        if self._options.tune_seconds is not None:
            self._progress.stage("tune")
            search(
                tunables,
                self._path,
                conditions,
                self._options.tune_seconds,
                Measurer(isa, threads),
                progress=self._progress.kernels,
            )
        chosen = recorded_choices(tunables, self._path, conditions)
        self.chosen = {**self.chosen, **chosen}
        return chosen


def _check_processor(isa: Isa) -> None:
    missing = missing_flags(isa)
    if missing:
        what = (
            f"this processor lacks {', '.join(missing)}, so kernels for {isa.name} cannot be measured on it"
        )
        raise DeviceError("HC401", what, remedy="compile without --tune, or tune on a processor that has it")
