"""Progress: a bar on a terminal that leaves nothing behind, and silence elsewhere."""

from __future__ import annotations

import io

import pytest

from hybridc.progress import terminal_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_sees_stages_and_kernels_and_a_wiped_line() -> None:
    terminal = Terminal()
    with terminal_progress(terminal) as progress:
        progress.stage("schedule")
        progress.kernels(1, 3)
        progress.kernels(3, 3)
        progress.stage("link")
    text = terminal.getvalue()
    assert "schedule" in text and "/3" in text and "link" in text
    assert text.rsplit("\r", 2)[-1].strip() == "" and "\n" not in text


def test_line_is_wiped_after_an_error() -> None:
    terminal = Terminal()
    with pytest.raises(RuntimeError), terminal_progress(terminal) as progress:
        progress.stage("schedule")
        raise RuntimeError
    assert terminal.getvalue().endswith("\r")


def test_pipe_sees_nothing() -> None:
    pipe = io.StringIO()
    with terminal_progress(pipe) as progress:
        progress.stage("schedule")
        progress.kernels(1, 3)
    assert pipe.getvalue() == ""
