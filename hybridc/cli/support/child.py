"""Run an artifact by `hybridc run` in a process of its own.

A process can have one emulated GPU, of one size, and a fault in a kernel ends it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridc.cli.support.files import write_array
from hybridc.errors import HybridcError, InternalError


@dataclass(frozen=True, slots=True)
class Ran:
    """Results of one run."""

    outputs: dict[str, np.ndarray]
    seconds: float
    gpu_allocated_bytes: int
    """As the emulated device counted, or else as the session did."""


class ChildError(HybridcError):
    """An error that the other process has put in words: its text and exit code are passed on."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__("HC900", text)
        self.text = text
        self.exit_code = exit_code

    def __str__(self) -> str:
        return self.text


def run_artifact(
    artifact: Path,
    feeds: dict[str, np.ndarray],
    folder: Path,
    emulated_bytes: int | None,
    threads: int | None,
    budget_bytes: int | None = None,
) -> Ran:
    """Run an artifact once, with files in `folder`; on an emulated GPU of `emulated_bytes` if given.

    Of several plans the one for `budget_bytes` is run.
    Raises ChildError with what the run reported, and InternalError HC912 if a signal killed it.
    """
    command = [
        sys.executable,
        "-m",
        "hybridc.cli",
        "run",
        str(artifact),
        "--json",
        "--output",
        str(folder / "outputs"),
    ]
    for number, (name, array) in enumerate(feeds.items()):
        path = folder / f"input{number}.npy"
        write_array(path, array)
        command += ["--input", f"{name}={path}"]
    if emulated_bytes is not None:
        command += ["--emulate-gpu", f"{emulated_bytes}B"]
    if budget_bytes is not None:
        command += ["--gpu-memory", f"{budget_bytes}B"]
    if threads is not None:
        command += ["--threads", str(threads)]
    ended = subprocess.run(command, capture_output=True, text=True, errors="backslashreplace", check=False)
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        raise InternalError("HC912", f"the run was killed by {name}", where=str(artifact))
    if ended.returncode != 0:
        raise ChildError(ended.stderr.rstrip(), ended.returncode)
    return _read(json.loads(ended.stdout))


def _read(report: dict[str, Any]) -> Ran:
    counted, booked = report["emulated_peak_bytes"], report["memory"]["gpu"]["allocated_bytes"]
    return Ran(
        outputs={output["name"]: np.load(output["path"], allow_pickle=False) for output in report["outputs"]},
        seconds=min(report["seconds"]),
        gpu_allocated_bytes=booked if counted is None else counted,
    )
