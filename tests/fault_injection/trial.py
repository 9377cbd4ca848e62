"""One session in which one call fails, and what must hold whatever the call was."""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import hybridc
from hybridc import emulator
from hybridc.errors import HybridcError
from hybridc.runtime import Session, code, memory
from hybridc.runtime.staging import SLOTS, Staging
from tests.fault_injection.faults import SYSTEM_CALLS, Fault, injected, kind_of

RUNS = 3
"""The first loads code, the second makes CUDA graphs, the third launches them."""
Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Network:
    """An artifact, with feeds and the results that another implementation gives for them."""

    name: str
    path: Path
    feeds: Feeds
    expected: tuple[np.ndarray, ...]
    slot_bytes: int | None = None
    """Of slots for streamed weights, where they are not pinned as a whole."""
    tolerance: float = 1e-5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a fault: the codes of the errors that were raised, none if it was made good unseen."""

    fault: Fault
    codes: tuple[str, ...]
    messages: tuple[str, ...]


_kept: list[Any] = []
"""Libraries that trials have loaded: they stay, as in a process they would."""


def count_calls(network: Network) -> Counter[str]:
    """How often a session calls each function that can fail."""
    with _prepared(network), injected(None) as counts:
        _use(network)
    return counts


def all_faults(network: Network) -> list[Fault]:
    """Each call once, and those of CUDA once more with the device lost."""
    faults = []
    for function, count in sorted(count_calls(network).items()):
        kind_of(function)
        is_cuda = function not in SYSTEM_CALLS
        faults += [
            Fault(function, i, lasting) for i in range(count) for lasting in (False, True)[: 1 + is_cuda]
        ]
    return faults


def try_fault(network: Network, fault: Fault) -> Outcome:
    """Load, run and close while one call fails. Raises AssertionError where a promise is broken.

    Every error is one of hybridc's, with code, place and remedy. Results are right or not there. Afterwards
    nothing is held, though the errors are kept. The session goes on at the next run; a lost device refuses
    it, until it is there again.
    """
    with _prepared(network):
        before = held()
        try:
            with injected(fault) as counts:
                errors = _use(network, is_lasting=fault.is_lasting)
            assert counts[fault.function] > fault.ordinal, "the call was never made"
            assert held() == before, f"leaked {_difference(before, held())}"
            for error in errors:
                _check_message(error)
        except BaseException:
            gc.collect()  # what an error that is not hybridc's holds
            raise
        finally:
            emulator.reset()
        assert not _use(network), "a new session fails"
        assert held() == before, "a new session leaks"
        return Outcome(fault, tuple(error.code for error in errors), tuple(map(str, errors)))


def held() -> Counter[str]:
    """What this process holds of the device, of pinned memory and of files."""
    found = emulator.statistics()
    names = ("used_bytes", "pinned_bytes", "streams", "events", "graphs")
    return Counter({name: getattr(found, name) for name in names}) + Counter(_open_files())


def _open_files() -> Iterator[str]:
    """What they are, but for those that the list of them is read from, and for sockets and eventfds: hybridc
    has none, but the telemetry of onnxruntime, which made the expected results, opens some now and then."""
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{handle}")
            if not name.startswith(("socket:", "anon_inode:[eventfd]")):
                yield name


def _use(network: Network, *, is_lasting: bool = False) -> list[HybridcError]:
    """Load, run and measure, each more than once, and go on after errors, which are returned."""
    errors: list[HybridcError] = []
    session = _attempt(errors, lambda: hybridc.load(network.path))
    if session is None:
        return errors
    try:
        for _ in range(RUNS):
            _run(network, session, errors)
        for _ in range(2):
            _attempt(errors, lambda: session.measure(network.feeds))
        if errors and not is_lasting:  # what failed once goes well the next time
            assert len(errors) == 1, f"fails again: {errors[-1]}"
    finally:
        session.close()
    return errors


def _run(network: Network, session: Session, errors: list[HybridcError]) -> None:
    results = _attempt(errors, lambda: session.run(None, dict(network.feeds)))
    for found, wanted in zip(results or (), network.expected, strict=results is not None):
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, atol=network.tolerance * scale, rtol=network.tolerance)


def _attempt(errors: list[HybridcError], action: Any) -> Any:
    try:
        return action()
    except HybridcError as error:
        errors.append(error)
        return None


def _check_message(error: HybridcError) -> None:
    assert error.code and error.remedy, error
    names = error.where or error.code == "HC402" or any(character.isdigit() for character in error.what)
    assert names, f"names nothing: {error}"
    assert error.code not in ("HC900", "HC412"), error


def _difference(before: Counter[str], after: Counter[str]) -> str:
    after.subtract(before)
    return ", ".join(f"{count} {key}" for key, count in after.items() if count)


@contextlib.contextmanager
def _prepared(network: Network) -> Iterator[None]:
    """Nothing loaded yet, and slots if the network is to have some."""
    _kept.extend(code._modules.values())
    code._modules.clear()
    choose = memory.choose_staging
    if network.slot_bytes is not None:
        slots = Staging(SLOTS * network.slot_bytes, SLOTS)
        choose = lambda *_: slots  # noqa: E731
    with mock.patch.object(memory, "choose_staging", choose):
        yield
