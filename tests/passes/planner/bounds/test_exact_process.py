"""One process of the exact solver serves many requests, whatever becomes of it in between."""

from __future__ import annotations

import importlib.util
import subprocess
from typing import Any

import pytest

from hybridc.passes.planner.bounds import exact_process
from hybridc.passes.planner.bounds.exact import _request, _Ticks
from hybridc.passes.planner.bounds.exact_process import ExactProcess
from tests.support.planner_problems import ProblemBuilder

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="needs OR-tools")

PATIENCE_S = 60.0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """Processes, in the order in which they were started."""
    children: list[subprocess.Popen[str]] = []
    start = exact_process._start

    def noted() -> subprocess.Popen[str]:
        children.append(start())
        return children[-1]

    monkeypatch.setattr(exact_process, "_start", noted)
    return children


def request(seed: int) -> dict[str, Any]:
    """Of two kernels that take as many microseconds as `seed`, and twice as many."""
    build = ProblemBuilder()
    first = build.kernel(size=3, gpu_us=seed, cpu_us=9 * seed)
    last = build.kernel(first, size=3, gpu_us=2 * seed, cpu_us=9 * seed)
    problem = build.problem(10, wanted=(last,))
    return _request(problem, _Ticks.of(problem, 100.0)) | {"keep_order": False, "effort": 1.0, "least": 0}


def test_requests_share_a_process(started: list[subprocess.Popen[str]]) -> None:
    process = ExactProcess()
    answers = [process.ask(request(seed), PATIENCE_S) for seed in (1, 2, 1)]
    assert len(started) == 1 and answers[0] == answers[2] != answers[1]


def test_process_that_has_ended_is_replaced(started: list[subprocess.Popen[str]]) -> None:
    process = ExactProcess()
    first = process.ask(request(1), PATIENCE_S)
    started[0].kill()
    started[0].wait()
    assert process.ask(request(1), PATIENCE_S) == first
    assert len(started) == 2


def test_late_answer_is_nobodys(started: list[subprocess.Popen[str]]) -> None:
    process = ExactProcess()
    assert process.ask(request(1), 0.0) is None
    assert started[0].poll() is not None
    assert process.ask(request(2), PATIENCE_S) == ExactProcess().ask(request(2), PATIENCE_S)


def test_interrupted_request_leaves_no_answer_behind(
    started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = ExactProcess()
    expected = process.ask(request(2), PATIENCE_S)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(exact_process.select, "select", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.ask(request(1), PATIENCE_S)
    assert process.ask(request(2), PATIENCE_S) == expected


def test_process_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_process, "_MODULE", "hybridc.no_such_module")
    with pytest.raises(RuntimeError, match="has ended"):
        ExactProcess().ask(request(1), PATIENCE_S)


def test_other_processes_have_their_own(started: list[subprocess.Popen[str]]) -> None:
    """A fork inherits the pipes of its parent's child."""
    process = ExactProcess()
    first = process.ask(request(1), PATIENCE_S)
    process._owner -= 1  # as in a child
    assert process.ask(request(1), PATIENCE_S) == first
    assert len(started) == 2
