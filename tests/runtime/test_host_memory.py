"""The host's memory: refused at load where there is too little, and one clear error where it is used up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridc.errors import DeviceError
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.runtime import load, memory
from hybridc.runtime.staging import check_room, host_room_bytes
from tests.support.process import PATIENCE_SECONDS

UNDER_LIMIT = """
import resource, sys
import numpy as np
import hybridc

def limit(more_bytes):
    with open("/proc/self/statm") as line:
        held_bytes = int(line.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held_bytes + more_bytes, resource.RLIM_INFINITY))

{before}
limit({more_bytes})
try:
    {attempt}
except hybridc.HybridcError as error:
    print(error.code)
finally:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
"""


def code_under_limit(artifact: Path, before: str, more_bytes: int, attempt: str) -> str:
    """Code of the error that an attempt meets with so much more address space."""
    text = UNDER_LIMIT.format(before=before, more_bytes=more_bytes, attempt=attempt)
    command = [sys.executable, "-c", text, str(artifact)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_too_little_memory_is_refused_at_load(cpu_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_room_bytes", lambda: 2 * ALIGNMENT_BYTES - 1)
    what = "needs 1,024 bytes of host memory, but 1,023 are available"
    with pytest.raises(DeviceError, match=what) as caught:
        load(cpu_artifact)
    assert caught.value.code == "HC408"


def test_room_may_be_used_up_to_the_last_byte() -> None:
    assert host_room_bytes() > 0
    check_room(7, 7)
    with pytest.raises(DeviceError, match="8 bytes of host memory, but 7 are available"):
        check_room(8, 7)


@pytest.mark.parametrize("more_bytes", [0, 1 << 20, 2 << 20, 4 << 20, 8 << 20])
def test_load_within_little_address_space_ends_in_one_error(cpu_artifact: Path, more_bytes: int) -> None:
    code = code_under_limit(cpu_artifact, "", more_bytes, "hybridc.load(sys.argv[1])")
    assert code in ("HC408", "HC412")


def test_run_within_little_address_space_ends_in_one_error(cpu_artifact: Path) -> None:
    before = """
session = hybridc.load(sys.argv[1])
feeds = {"the/x": np.ones((4, 8), np.float32)}
session.run(None, feeds)
session._plans[0].output = lambda *_: np.empty(1 << 40)
"""
    assert code_under_limit(cpu_artifact, before, 0, "session.run(None, feeds)") == "HC412"
