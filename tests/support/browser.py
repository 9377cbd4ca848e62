"""Chromium without a window, steered over two pipes: what a test of a page needs of the DevTools protocol."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--window-size=1400,1600",
    "--remote-debugging-pipe",
)
_PATIENCE_SECONDS = 600
"""A browser that is needed for longer hangs: it is ended, and so is the test."""
_FROM_US, _TO_US = 3, 4  # the descriptors that Chromium reads commands from and writes answers to


class Page:
    """One page, and what went wrong in it."""

    def __init__(self, commands: Any, answers: Any) -> None:
        self._commands = commands
        self._answers = answers
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []

    def open(self, url: str) -> None:
        """Load a page and wait until it is there."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call("Page.navigate", url=url)
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; of a promise, once it is there."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def move_pointer(self, x: float, y: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def turn_wheel(self, x: float, y: float, by: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    def resize(self, width: int, height: int) -> None:
        """As on a screen of so many pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        """The next message; errors of the page and what it asks the network for are noted."""
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(str(parameters["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        return message


@contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """A page of a browser that keeps its files in `profile`. Skips the test where there is no Chromium."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium")
    (command_end, our_commands), (our_answers, answer_end) = _high_pipe(), _high_pipe()
    redirected = f'exec "$@" {_FROM_US}<&{command_end} {_TO_US}>&{answer_end}'
    process = subprocess.Popen(
        ["bash", "-c", redirected, "bash", path, *_OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(command_end, answer_end),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_end)
    os.close(answer_end)
    patience = threading.Timer(_PATIENCE_SECONDS, process.kill)
    patience.start()
    try:
        with open(our_commands, "wb") as commands, open(our_answers, "rb") as answers:
            yield Page(commands, answers)
    finally:
        patience.cancel()
        process.kill()  # nothing that it would save is needed
        process.wait()


def _high_pipe() -> tuple[int, int]:
    """A pipe whose descriptors are none of those that it will be put on."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
