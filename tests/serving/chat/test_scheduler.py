"""Requests that share a decoder: what becomes of the others when one is given up, fails or comes late."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import PATIENCE_SECONDS
from tests.support.serving import needs_kserve

pytestmark = needs_kserve


SCENARIOS = (
    "rows_go_on_together_and_prompts_are_read_in_parts",
    "who_leaves_makes_room",
    "errors_end_what_took_part_in_the_run",
    "queues_end_and_so_does_waiting",
    "idle_sequences_leave_room_for_runs",
)


@pytest.fixture(scope="module")
def failures() -> dict[str, str | None]:
    """Of the scenarios, in a process of their own: KServe and tritonclient cannot be imported in one."""
    command = [sys.executable, "-m", "tests.serving.chat.scenarios", *SCENARIOS]
    root = Path(__file__).parents[3]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scheduler(scenario: str, failures: dict[str, str | None]) -> None:
    assert failures[scenario] is None, failures[scenario]
