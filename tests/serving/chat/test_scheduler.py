"""Requests that share a decoder: what becomes of the others when one is given up, fails or comes late."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import PATIENCE_SECONDS
from tests.support.serving import needs_kserve

pytestmark = needs_kserve


@pytest.mark.parametrize(
    "scenario",
    [
        "rows_go_on_together_and_prompts_are_read_in_parts",
        "who_leaves_makes_room",
        "errors_end_what_took_part_in_the_run",
        "queues_end_and_so_does_waiting",
        "idle_sequences_leave_room_for_runs",
    ],
)
def test_scheduler(scenario: str) -> None:
    """In a process of its own: KServe and tritonclient cannot be imported in one."""
    command = [sys.executable, "-m", "tests.serving.chat.scenarios", scenario]
    root = Path(__file__).parents[3]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert ran.returncode == 0, ran.stderr
