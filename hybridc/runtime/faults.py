"""What kernels that check their values find wrong with them: looked at once, at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hybridc.errors import UsageError
from hybridc.ir import Check, CheckKind, Device
from hybridc.ir.bind import FAULT_BYTES, FAULT_DTYPE, FaultRows


class Faults:
    """A row for each check of a plan's kernels, in host memory that is pinned where a GPU writes it."""

    def __init__(
        self, helper: Callable[[str], Any], checks: tuple[Check, ...], *, pinned: bool, gpu: int
    ) -> None:
        self._helper = helper
        self._checks = checks
        self._gpu = gpu
        self._memory = helper("host_arena")(len(checks) * FAULT_BYTES, pinned)
        self._rows = np.from_dlpack(self._memory).view(FAULT_DTYPE).reshape(len(checks), 2)
        self._rows[:] = 0

    def watch(self, lanes: int) -> None:
        """Let each run of lanes return the first row whose check has failed."""
        self._helper("set_faults")(lanes, self._memory)

    def array(self, rows: FaultRows) -> Any:
        """What a kernel is called with."""
        where = self._memory, rows.offset_bytes, rows.shape, FAULT_DTYPE
        if rows.device is Device.GPU:
            return self._helper("pinned_view")(self._gpu, *where)
        return self._helper("arena_view")(*where)

    def clear(self) -> None:
        """Forget what has been found."""
        self._rows[:] = 0

    def error(self, row: int) -> UsageError:
        """Of a check that has failed, with the value that the kernel found."""
        return illegal_value(self._checks[row], int(self._rows[row, 1]))


def illegal_value(check: Check, value: int) -> UsageError:
    """The error HC560 of a value that a node does not allow, or HC586 of a loop that does not end."""
    what = f"{check.operator} {check.node!r}: {_finding(check, value)}"
    if check.kind is CheckKind.TRIPS:
        return UsageError("HC586", what, remedy="compile the model with a larger --bound")
    return UsageError("HC560", what, remedy="feed values that the node allows")


def check_fed(array: np.ndarray, checks: Sequence[Check]) -> None:
    """Make the checks of an input before a run. Raises UsageError HC560 for an index that is outside."""
    if not checks or not array.size:
        return
    ends = int(array.min()), int(array.max())
    for check in checks:
        for value in ends:
            if not check.lower <= value <= check.upper:
                raise illegal_value(check, value)


def _finding(check: Check, value: int) -> str:
    if check.kind is CheckKind.DIVISOR:
        return f"the divisor is {value}"
    if check.kind is CheckKind.TRIPS:
        return f"has not ended within its bound of {check.upper:,} trips"
    return f"index {value} is outside of [{check.lower}, {check.upper}]"
