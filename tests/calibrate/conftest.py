"""An emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridc import emulator
from hybridc.errors import DeviceError


@pytest.fixture
def gpu() -> Iterator[None]:
    try:
        emulator.start(1 << 30)
    except DeviceError as error:
        if error.code != "HC420":
            raise
        pytest.skip(str(error))
    yield
    emulator.reset()
