"""What was measured, kept in a small JSON file that many compilations share.

    {"format": 1, "kernels": {KEY: {"kernel": "conv2d_add_maximum", "rule": "conv2d", "isa": "avx512",
        "threads": 2, "processor": "AMD EPYC, 25, 17", "version": "0.1.0", "predicted": "14x2", "ms": 0.21,
        "relative": {"14x2": 1.0, "8x3": 0.93}}}}

KEY identifies a function, how it is scheduled and what it was measured on. `relative` holds times of tiles
over that of the predicted one, all called in turn: so what was measured on a busy machine can be joined with
what was measured on a quiet one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hybridc.caches import cache_path
from hybridc.errors import UsageError

FORMAT = 1
WORTHWHILE = 0.98
"""Another tile than the predicted one is taken if it needs at most this share of its time: less is noise."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Times of the tiles of one function."""

    kernel: str
    rule: str
    isa: str
    threads: int
    processor: str
    version: str
    predicted: str
    """Label of the tile predicted to be best."""
    ms: float
    """Time of the predicted tile, when it was measured last."""
    relative: Mapping[str, float]
    """Time of each tile measured so far, by label, over that of the predicted one."""

    def best(self) -> str:
        """The label to take."""
        label = min(self.relative, key=lambda label: self.relative[label])
        return label if self.relative[label] <= WORTHWHILE else self.predicted

    def joined(self, newer: Entry) -> Entry:
        """Both measurements; the newer one where they overlap, alone if another tile is predicted now."""
        if self.predicted != newer.predicted:
            return newer
        return replace(newer, relative={**self.relative, **newer.relative})


def key_of(*identity: object) -> str:
    """A short key of everything that a measurement depends on."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def default_path() -> Path:
    """`tuning.json` in the user's cache."""
    return cache_path("tuning.json")


def read_record(path: Path) -> dict[str, Entry]:
    """Entries by key. Raises UsageError HC523 if there is no such file or it is not a tuning record."""
    try:
        return _parse(path.read_text())
    except FileNotFoundError as error:
        reason, remedy = str(error.strerror), "create one: --tune --tune-record FILE"
    except OSError as error:
        reason, remedy = str(error.strerror), "choose another --tune-record"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        reason, remedy = "it is damaged or of another version", "delete it, or choose another --tune-record"
    raise UsageError("HC523", f"cannot read the tuning record: {reason}", where=str(path), remedy=remedy)


def add_to_record(path: Path, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Join entries with those of the file, which is made if there is none, and return them all.

    A process that is stopped at any moment leaves the old file or the new one; processes that add at the
    same time wait for each other. Raises UsageError HC523 like `read_record`, HC524 if it cannot be written.
    """
    try:
        with _locked(path):
            known = read_record(path) if path.exists() else {}
            known |= {key: known[key].joined(e) if key in known else e for key, e in entries.items()}
            _replace(path, known)
        return known
    except OSError as error:
        what = f"cannot write the tuning record: {error.strerror or error}"
        raise UsageError("HC524", what, where=str(path), remedy="choose another --tune-record") from error


def _parse(text: str) -> dict[str, Entry]:
    content = json.loads(text)
    if content["format"] != FORMAT:
        raise ValueError
    entries = {key: Entry(**fields) for key, fields in content["kernels"].items()}
    for entry in entries.values():
        times = [entry.ms, *entry.relative.values()]
        if not all(isinstance(t, int | float) and 0 < t <= sys.float_info.max for t in times):
            raise ValueError
        if entry.predicted not in entry.relative:
            raise ValueError
    return entries


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among the processes that use `path`. The lock's own file stays: the record itself is replaced."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(path: Path, entries: Mapping[str, Entry]) -> None:
    content = {"format": FORMAT, "kernels": {key: asdict(entry) for key, entry in sorted(entries.items())}}
    whole = path.with_name(f".{path.name}.new")  # only one process writes it, the one that has the lock
    try:
        whole.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(whole, path)
    finally:
        whole.unlink(missing_ok=True)
