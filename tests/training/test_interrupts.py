"""Signals that come while states are being replaced."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from hybridc.training.interrupts import uninterrupted


@pytest.fixture(autouse=True)
def interrupts_are_handled() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(1)
        done.append(2)
    assert done == [1]


def test_handlers_are_those_from_before_again() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
