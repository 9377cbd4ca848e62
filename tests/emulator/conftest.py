"""The emulated device for one test, given back to the rest of the process as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridc import emulator
from hybridc.emulator import device as emulator_device
from hybridc.emulator.device import ThreadOrder
from hybridc.errors import DeviceError
from tests.support.gpu_program import release_all

DEVICE_BYTES = 64 << 20


@pytest.fixture
def device() -> Iterator[None]:
    """Start the emulated GPU with 64 MiB beyond what other tests of this process hold."""
    before = emulator_device._process.configuration
    used_bytes = emulator.statistics().used_bytes if before else 0
    try:
        emulator.start(used_bytes + DEVICE_BYTES)
    except DeviceError as error:
        if error.code != "HC420":  # a real driver in this process: nothing can be emulated beside it
            raise
        pytest.skip(str(error))
    yield
    emulator.reset()
    release_all()
    emulator.start(
        before.capacity_bytes if before else 1 << 40,
        thread_order=ThreadOrder(before.thread_order if before else 0),
        lazy_streams=bool(before.lazy_streams) if before else False,
    )


def restart(*, thread_order: ThreadOrder = ThreadOrder.FORWARD, lazy_streams: bool = False) -> None:
    """Change the running device, keeping its memory."""
    emulator.start(emulator.statistics().capacity_bytes, thread_order=thread_order, lazy_streams=lazy_streams)
