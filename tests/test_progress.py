"""Progress: a bar on a terminal that leaves nothing behind, and plain lines elsewhere."""

from __future__ import annotations

import io

import pytest

from hybridc.progress import Bar, Lines, listener, terminal_progress


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


def test_bar_counts_seconds_while_nothing_is_told() -> None:
    terminal = Terminal()
    bar = Bar(terminal)
    bar.stage("link")
    before = len(terminal.getvalue())
    bar.tick()
    assert "link" in terminal.getvalue()[before:]
    bar.close()
    bar.tick()
    assert terminal.getvalue().endswith("\r")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pipe_gets_a_line_for_each_stage_that_took_long() -> None:
    pipe, clock = io.StringIO(), Clock()
    lines = Lines(pipe, clock)
    for stage, seconds in (("import", 1.24), ("passes", 0.0), ("fuse", 0.4), ("code", 3.0)):
        lines.stage(stage)
        lines.kernels(1, 3)
        clock.now += seconds
        lines.tick()
    lines.close()
    lines.close()
    assert pipe.getvalue() == "import 1.2 s\ncode 3.0 s\n"


def test_pipe_hears_of_a_long_stage_every_ten_seconds() -> None:
    pipe, clock = io.StringIO(), Clock()
    lines = Lines(pipe, clock)
    lines.stage("code")
    for second in range(25):
        if second == 15:
            lines.kernels(14, 56)
        lines.tick()
        clock.now += 1
    lines.close()
    assert pipe.getvalue() == "code after 10 s\ncode 14 of 56 after 20 s\ncode 25.0 s\n"


def test_pipe_that_nobody_reads_stops_nothing() -> None:
    clock = Clock()
    pipe = io.StringIO()
    pipe.close()
    lines = Lines(pipe, clock)
    lines.stage("code")
    clock.now += 30
    lines.tick()
    lines.close()


def test_quiet_says_nothing() -> None:
    terminal = Terminal()
    with terminal_progress(terminal, quiet=True) as progress:
        progress.stage("schedule")
        progress.kernels(1, 3)
    assert terminal.getvalue() == ""


def test_callback_hears_the_stage_of_every_count() -> None:
    heard: list[tuple[str, int, int | None]] = []
    progress = listener(lambda *told: heard.append(told))
    progress.stage("import")
    progress.stage("code")
    progress.kernels(1, 3)
    assert heard == [("import", 0, None), ("code", 0, None), ("code", 1, 3)]


def test_log_of_a_search_tells_the_best_plan_so_far() -> None:
    pipe, clock = io.StringIO(), Clock()
    lines = Lines(pipe, clock)
    lines.stage("plan")
    for second in range(25):
        if second in (1, 15):
            lines.note(f"best {14 - second / 10:.1f} ms within {20 - second:.1f} % of the bound")
        lines.tick()
        clock.now += 1
    lines.stage("verify")
    lines.close()
    assert pipe.getvalue() == (
        "plan after 10 s, best 13.9 ms within 19.0 % of the bound\n"
        "plan after 20 s, best 12.5 ms within 5.0 % of the bound\n"
        "plan 25.0 s, best 12.5 ms within 5.0 % of the bound\n"
    )


def test_bar_tells_what_a_stage_says_of_itself_until_the_next_begins() -> None:
    terminal = Terminal()
    bar = Bar(terminal)
    bar.stage("plan")
    bar.note("best 13.9 ms")
    bar.kernels(1, 3)
    assert "best 13.9 ms" in terminal.getvalue().rsplit("\r", 1)[-1]
    bar.stage("verify")
    assert "best" not in terminal.getvalue().rsplit("\r", 1)[-1]
    bar.close()
