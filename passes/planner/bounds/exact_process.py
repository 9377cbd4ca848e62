"""The process of the exact solver, as others see it: one serves all requests, and ends when it is idle.

To import OR-tools takes longer than most proofs of small graphs do.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from typing import Any

_MODULE = "hybridc.passes.planner.bounds.exact_child"


class ExactProcess:
    """A child that answers one request after the other, of any thread and behind a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._owner = 0

    def ask(self, request: dict[str, Any], patience_s: float) -> dict[str, Any] | None:
        """The answer, or None if it has taken longer than `patience_s` seconds.

        Raises RuntimeError if the process ends instead.
        """
        text = json.dumps(request)
        with self._lock:
            if self._child is not None and self._owner == os.getpid():
                try:
                    return self._answer(self._child, text, patience_s)
                except (BrokenPipeError, EOFError):
                    pass  # it was idle for too long
            self._owner, self._child = os.getpid(), _start()
            try:
                return self._answer(self._child, text, patience_s)
            except (BrokenPipeError, EOFError) as error:
                raise RuntimeError("the process of the exact solver has ended") from error

    def _answer(self, child: subprocess.Popen[str], request: str, patience_s: float) -> dict[str, Any] | None:
        """As `ask`; raises BrokenPipeError or EOFError if the child has ended."""
        assert child.stdin is not None and child.stdout is not None
        answer: dict[str, Any] | None = None
        try:
            child.stdin.write(request + "\n")
            child.stdin.flush()
            if select.select([child.stdout], [], [], patience_s)[0]:
                line = child.stdout.readline()
                if not line:
                    raise EOFError
                answer = json.loads(line)
        finally:
            if answer is None:  # interrupted, too: what it says next would be no answer to anybody
                self._child = None
                child.kill()
                child.wait()
        return answer


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # an interrupt at the terminal is for the process that asks
    )
