"""Ctrl-C ends the process even where no exception gets through."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridc.cli.support import interrupts as interrupts_module
from hybridc.cli.support.interrupts import noted_interrupts
from tests.support.process import PATIENCE_SECONDS

_DEAF = """
import sys, threading, time
from pathlib import Path
from hybridc.cli.support.interrupts import noted_interrupts
from hybridc.scratch import scratch_folder

with noted_interrupts(), scratch_folder("half-done-", Path(sys.argv[1])):
    while True:
        try:
            print("ready", flush=True)
            time.sleep(3600)
        except KeyboardInterrupt:  # like TVM, which takes it for a schedule that does not apply
            pass
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_that_is_swallowed_ends_the_process_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = subprocess.Popen([sys.executable, "-c", _DEAF, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    assert any(tmp_path.iterdir())
    process.send_signal(number)
    assert process.wait(PATIENCE_SECONDS) == 128 + number
    assert not any(tmp_path.iterdir())
    process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_block_that_ends_in_time_is_left_alone(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts_module, "GRACE_SECONDS", PATIENCE_SECONDS)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), noted_interrupts() as interrupts:
        signal.raise_signal(number)
    assert interrupts == [number]
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1
