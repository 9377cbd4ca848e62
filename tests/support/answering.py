"""A process that may die or hang: it answers lines with lines, and is started again where it ended."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_SECONDS = 300.0
"""For the process to load what it needs."""


class NoAnswer(Exception):
    """The process ended, or did not answer in time; the text says which."""

    def __init__(self, text: str, *, late: bool) -> None:
        super().__init__(text)
        self.late = late


class Answering:
    """A process that greets with a line, and answers each line with one."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], limit_seconds: float) -> None:
        self._command, self._environment = command, environment
        self._limit_seconds = limit_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self.greeting = b""

    def start(self) -> None:
        """Start the process, unless it runs. Raises RuntimeError if it does not greet."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=os.environ | self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        greeting = self._line(START_SECONDS)
        if greeting is None:
            raise RuntimeError(f"{' '.join(self._command)} does not start")
        self.greeting = greeting

    def ask(self, question: str) -> bytes:
        """The answer. Raises NoAnswer, after which the process has ended."""
        self.start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(f"{question}\n".encode())
        self._process.stdin.flush()
        start = time.monotonic()
        line = self._line(self._limit_seconds)
        if line is not None:
            return line
        late = time.monotonic() - start >= self._limit_seconds
        code = self.stop()
        told = f"takes more than {self._limit_seconds:g} s" if late else f"the process ended with {code}"
        raise NoAnswer(told, late=late)

    def stop(self) -> int:
        """End the process; returns its exit code."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        process.kill()
        process.communicate()
        return process.returncode

    def _line(self, seconds: float) -> bytes | None:
        """The next line that the process writes; None if it ends, or does not within `seconds`."""
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else b""
        if not line and ready:
            self._process.wait()
        return line or None
