"""A measured choice among the tiles that a rule offers for a function (`Scheduled.choices`).

Functions with the largest predicted share of a run come first. All tiles of a function are called in turn on
cold buffers, with as many threads as a session will have. What was measured is written down after every
function, so a search that is interrupted has not been in vain, and the next one goes on where it ended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm_ffi

from hybridc.passes.schedule import Tunable
from hybridc.schedules.rule import Scheduled
from hybridc.tuning.record import Entry, add_to_record, key_of, read_record

_CPUINFO_FIELDS = ("model name", "cpu family", "model")

Measure = Callable[[Iterable[Scheduled], Callable[[], bool]], list[float]]
"""Milliseconds of versions of one function; of the first few only, once the second argument says that time
is up."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a measurement depends on besides the function and its rule."""

    isa: str
    threads: int
    processor: str
    version: str


def this_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name, family and model of the processor: the name alone may stand for several generations."""
    text = cpuinfo.read_text()
    found = (re.search(rf"^{field}\s*:\s*(.+)$", text, re.MULTILINE) for field in _CPUINFO_FIELDS)
    return ", ".join(match.group(1) if match else "unknown" for match in found)


def search(
    tunables: Sequence[Tunable],
    path: Path,
    conditions: Conditions,
    seconds: float,
    measure: Measure,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measure tiles that the record at `path` does not know, for about `seconds`.

    A function begun is measured to its end, with two tiles at least. Raises UsageError HC523 or HC524.
    """
    end = clock() + seconds
    known = add_to_record(path, {})
    for done, tunable in enumerate(sorted(tunables, key=lambda t: -t.flops)):
        progress(done, len(tunables))
        if clock() >= end:
            break
        labels = _unmeasured(tunable, known.get(key(tunable, conditions)))
        if labels:
            labels = (tunable.scheduled.choices[0], *labels)
            times = measure(map(tunable.version, labels), lambda: clock() >= end)
            entry = _entry(tunable, conditions, dict(zip(labels, times, strict=False)))
            known = add_to_record(path, {key(tunable, conditions): entry})
    progress(len(tunables), len(tunables))


def recorded_choices(tunables: Sequence[Tunable], path: Path, conditions: Conditions) -> dict[str, str]:
    """Labels of the tiles that were measured to be worthwhile, by function. Raises UsageError HC523."""
    known = read_record(path)
    found = {tunable.name: known.get(key(tunable, conditions)) for tunable in tunables}
    predicted = {tunable.name: tunable.scheduled.choices[0] for tunable in tunables}
    return {
        name: entry.best()
        for name, entry in found.items()
        if entry and entry.predicted == predicted[name] != entry.best()
    }


def key(tunable: Tunable, conditions: Conditions) -> str:
    """The key of a function's entry in the record."""
    request = tunable.request
    return key_of(
        tvm_ffi.structural_hash(request.function),
        sorted(request.constants),
        request.winograd,
        *(["many sizes"] if request.many_sizes else []),  # its tiles read weights in another way
        tunable.scheduled.rule,
        conditions.isa,
        conditions.threads,
        conditions.processor,
        conditions.version,
    )


def _unmeasured(tunable: Tunable, entry: Entry | None) -> tuple[str, ...]:
    predicted, *others = tunable.scheduled.choices
    known: Mapping[str, float] = entry.relative if entry and entry.predicted == predicted else {}
    return tuple(label for label in others if label not in known)


def _entry(tunable: Tunable, conditions: Conditions, times_ms: Mapping[str, float]) -> Entry:
    predicted = tunable.scheduled.choices[0]
    relative = {label: round(ms / times_ms[predicted], 4) for label, ms in times_ms.items()}
    return Entry(
        kernel=tunable.name,
        rule=tunable.scheduled.rule,
        isa=conditions.isa,
        threads=conditions.threads,
        processor=conditions.processor,
        version=conditions.version,
        predicted=predicted,
        ms=round(times_ms[predicted], 6),
        relative=relative,
    )
