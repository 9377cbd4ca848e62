"""Lines are as wide as the terminal, and whole where there is none."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from hybridc.cli.support.terminal import output_width, print_text


def test_file_or_pipe_has_no_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert output_width() is None
    print_text("word " * 100)
    assert capsys.readouterr().out == "word " * 100 + "\n"


def test_long_lines_are_continued_further_in_and_paths_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_text("\n  a-b c-d e-f g-h i-j k-l\n\n/a/very/long/path/of-some/file x\n")
    assert (
        capsys.readouterr().out == "\n  a-b c-d e-f g-h\n    i-j k-l\n\n/a/very/long/path/of-some/file\n  x\n"
    )


@pytest.mark.parametrize("columns", [60, 132])
def test_width_is_that_of_the_terminal(columns: int) -> None:
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        code = "import sys; from hybridc.cli.support.terminal import output_width as w; sys.exit(w())"
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        assert subprocess.call([sys.executable, "-c", code], stdout=theirs, env=environment) == columns
    finally:
        os.close(ours)
        os.close(theirs)
