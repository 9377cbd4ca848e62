"""Draw inputs from a seed, try each in a process that may die or hang, and count what became of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

from hybridc.errors import HybridcError

MEMORY_BYTES = 12 << 30
"""Address space of a process that tries inputs: one that asks for all memory must not stop the machine."""
IDLE_FACTOR = 10
"""A process that waits is told by the clock, which runs faster the more other processes there are."""
START_SECONDS = 300.0
"""Of the clock, for a new process to import TVM."""


class Outcome(StrEnum):
    """What became of an input."""

    REFUSED = "refused"
    """A HybridcError whose code blames the input."""
    RIGHT = "right"
    """It ran, and its results are those of the oracle."""
    ACCEPTED = "accepted"
    """Nothing was wrong with it, but no oracle could judge a result."""
    WRONG = "wrong"
    """It ran, and its results are not those of the oracle, or it did harm."""
    CRASH = "crashes"
    HANG = "hangs"
    INTERNAL = "internal"
    """An exception that is no HybridcError, or a HybridcError that blames hybridc (HC9xx)."""


FAULTS = (Outcome.WRONG, Outcome.CRASH, Outcome.HANG, Outcome.INTERNAL)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one input, and a word on why: an error code, a difference, a traceback."""

    outcome: Outcome
    note: str = ""


Check = Callable[[Random, Path], Verdict]
"""Draws one input from the random numbers, tries it in an empty folder, and judges. Exceptions that leave it
count as refusals or internal faults."""


@dataclass(frozen=True, slots=True)
class Harness:
    """A kind of input."""

    name: str
    check: Check
    """A function of a module, so that another process finds it."""
    seconds: int
    """More processor time than this is a hang: several times what the slowest input takes."""


@dataclass(frozen=True, slots=True)
class Find:
    """A fault. The input is drawn again by `--seed SEED --only INDEX`."""

    index: int
    outcome: Outcome
    note: str


@dataclass
class Report:
    """Counts of one run."""

    harness: str
    seed: int
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    """By error code."""
    finds: list[Find] = field(default_factory=list)

    def add(self, index: int, verdict: Verdict) -> None:
        """Count one input."""
        self.outcomes[verdict.outcome] += 1
        if verdict.outcome is Outcome.REFUSED:
            self.refusals[verdict.note] += 1
        elif verdict.outcome in FAULTS:
            self.finds.append(Find(index, verdict.outcome, verdict.note))

    def to_json(self) -> dict[str, object]:
        """Counts of all outcomes, refusals by code, and the faults."""
        return {
            "harness": self.harness,
            "seed": self.seed,
            "inputs": self.outcomes.total(),
            **{outcome.value: self.outcomes[outcome] for outcome in Outcome},
            "refusals": dict(sorted(self.refusals.items())),
            "finds": [dataclasses.asdict(find) for find in sorted(self.finds, key=lambda f: f.index)],
        }


def try_input(harness: Harness, seed: int, index: int) -> Verdict:
    """Draw and judge one input in this process."""
    with tempfile.TemporaryDirectory(prefix="hybridc-fuzz-") as folder:
        try:
            return harness.check(Random(f"{harness.name} {seed} {index}"), Path(folder))
        except HybridcError as error:
            ours = error.code.startswith("HC9")
            return Verdict(Outcome.INTERNAL, f"{error.code}: {error}") if ours else refused(error)
        except Exception:
            return Verdict(Outcome.INTERNAL, traceback.format_exc())


def refused(error: HybridcError) -> Verdict:
    """A refusal; it must say what, and what to do."""
    if not error.what:
        return Verdict(Outcome.WRONG, f"{error.code} says nothing")
    return Verdict(Outcome.REFUSED, error.code)


def fuzz(
    harness: Harness, seed: int, *, inputs: int | None = None, seconds: float | None = None, workers: int = 1
) -> Report:
    """Try inputs 0, 1, ... until there are `inputs` of them or `seconds` have passed."""
    report = Report(harness.name, seed)
    end = None if seconds is None else time.monotonic() + seconds
    indices = _indices(inputs, end)
    lock = threading.Lock()

    def work() -> None:
        worker = _Worker(harness, seed)
        try:
            while True:
                with lock:
                    index = next(indices, None)
                if index is None:
                    return
                verdict = worker.judge(index)
                with lock:
                    report.add(index, verdict)
                    if verdict.outcome in FAULTS:
                        print(f"{harness.name} {index}: {verdict.outcome}", file=sys.stderr, flush=True)
        finally:
            worker.stop()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return report


def _indices(inputs: int | None, end: float | None) -> Iterator[int]:
    index = 0
    while (inputs is None or index < inputs) and (end is None or time.monotonic() < end):
        yield index
        index += 1


class _Worker:
    """A process that judges one input after the other; a new one takes the place of one that died."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.harness, self.seed = harness, seed
        self.process: multiprocessing.process.BaseProcess | None = None
        self.connection: Connection | None = None

    def judge(self, index: int) -> Verdict:
        try:
            connection = self._connected()
            connection.send(index)
            if connection.poll(self.harness.seconds * IDLE_FACTOR):
                return connection.recv()
            verdict = Verdict(Outcome.HANG, "it waits")
        except (EOFError, OSError):
            assert self.process is not None
            self.process.join()
            code = self.process.exitcode
            verdict = Verdict(Outcome.CRASH, f"exit code {code}")
            if code == -signal.SIGXCPU:
                verdict = Verdict(Outcome.HANG, f"more than {self.harness.seconds} s of processor time")
        self.stop()
        return verdict

    def stop(self) -> None:
        if self.process is not None and self.connection is not None:
            self.connection.close()
            self.process.kill()
            self.process.join()
        self.process = self.connection = None

    def _connected(self) -> Connection:
        if self.connection is None:
            context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs, self.harness, self.seed), daemon=True)
            self.process.start()
            theirs.close()
            if not self.connection.poll(START_SECONDS):
                raise TimeoutError("a process did not start")
            self.connection.recv()
        return self.connection


def _serve(connection: Connection, harness: Harness, seed: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send("ready")
    while True:
        try:
            index = connection.recv()
        except EOFError:
            return
        # one second more than the input may take, as the limit has whole seconds
        limit = int(time.process_time()) + 1 + harness.seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        connection.send(try_input(harness, seed, index))


def main(harness: Harness, arguments: list[str] | None = None) -> int:
    """The command line of a harness; returns 1 if there were faults."""
    parser = argparse.ArgumentParser(description=f"Try random inputs: {harness.name}.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to draw inputs")
    parser.add_argument("--inputs", type=int, help="how many inputs, instead of --minutes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where to write the counts, instead of printing them"
    )
    parser.add_argument("--only", type=int, metavar="INDEX", help="draw this input alone, in this process")
    given = parser.parse_args(arguments)
    if given.only is not None:
        verdict = try_input(harness, given.seed, given.only)
        print(f"{verdict.outcome}: {verdict.note}")
        return int(verdict.outcome in FAULTS)
    seconds = None if given.inputs is not None else 60 * given.minutes
    report = fuzz(harness, given.seed, inputs=given.inputs, seconds=seconds, workers=given.workers)
    text = json.dumps(report.to_json(), indent=1) + "\n"
    if given.json is None:
        sys.stdout.write(text)
    else:
        given.json.write_text(text, encoding="utf-8")
    return int(bool(report.finds))
