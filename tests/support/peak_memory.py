"""The most host memory that a session takes above what its process had before, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

import hybridc
from hybridc import emulator
from hybridc.runtime import Session

_LARGEST_RUNS = 500
"""Until each thread has had a part of a run, and so its stack and heap, however busy the computer is."""
_RESET_PEAK = "5"
"""What Linux takes for the highest resident size to count from now on (proc(5), clear_refs)."""


def peak_bytes(path: Path, runs: int, *, emulate_gpu: str | None = None) -> int:
    """Of loading an artifact, some runs at its largest sizes, and as many as `runs`, less one, at drawn ones.

    Requires: inputs are floats. On an emulated GPU its memory is the host's, too.
    """
    script = f"from {__name__} import measured; print(measured(*{[str(path), runs, emulate_gpu]!r}))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return int(done.stdout.splitlines()[-1])


def measured(path: str, runs: int, emulate_gpu: str | None) -> int:
    """As `peak_bytes`, in this process."""
    if emulate_gpu is not None:
        emulator.preload()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _highest_bytes()
    with hybridc.load(path, emulate_gpu=emulate_gpu) as session:
        for sizes in _drawn_sizes(session, runs):
            session.run(None, _feeds(session, sizes))
    return _highest_bytes() - before


def _highest_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def _drawn_sizes(session: Session, runs: int) -> Iterator[Mapping[str, int]]:
    random, buckets = np.random.default_rng(0), session.buckets()
    largest = {name: high for name, (_, high) in buckets[-1].sizes.items()}
    least = {name: min(bucket.sizes[name][0] for bucket in buckets) for name in largest}
    yield from [largest] * _LARGEST_RUNS
    for _ in range(runs - 1):
        yield {name: int(random.integers(least[name], high + 1)) for name, high in largest.items()}


def _feeds(session: Session, sizes: Mapping[str, int]) -> Mapping[str, np.ndarray]:
    return {
        each.name: np.ones([sizes.get(each.open.get(i, ""), n) for i, n in enumerate(each.shape)], np.float32)
        for each in session.get_inputs()
    }
