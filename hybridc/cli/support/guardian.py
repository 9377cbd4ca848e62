"""A process whose parent tells how it ended: nobody else can, if it was killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import warnings

from hybridc.errors import DeviceError

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def go_on_in_a_child(name: str, forwarding_seconds: float) -> None:
    """Return in a child; the parent stays behind, and ends as the child does.

    If a signal kills the child, the parent says so of `name`, and waits till that is read before it ends. The
    child gets the signals that the parent gets, and does not outlive it. Threads of Python stay behind with
    the parent.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    signal.set_wakeup_fd(-1)  # whom it wakes would end the parent
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which only wait for signals
        child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it had ended before
        os.setpgid(0, 0)  # signals of a terminal come by way of the parent alone
        return
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        killer = signal.Signals(os.WTERMSIG(status))
        what = f"{name} was killed by {killer.name}"
        told = DeviceError("HC434", what, remedy="go on from the last checkpoint with --resume")
        print(told, file=sys.stderr, flush=True)
        time.sleep(forwarding_seconds)
        # a launcher ends the others of a process that a signal killed, and maybe not of one with an exit code
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(killer, signal.SIG_DFL)
        os.kill(os.getpid(), killer)
    os._exit(os.waitstatus_to_exitcode(status))
