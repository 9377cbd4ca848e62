"""Requests to a decoder: each has a sequence of its own, and all of them go on in turn."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from kserve.errors import ModelNotReady

from hybridc.errors import HybridcError
from hybridc.generation import GenerationSession, Sampling
from hybridc.generation.sampling import choose
from hybridc.serving.metrics import TOKENS, WAITING
from hybridc.serving.refusals import QueueFull, TimedOut, told_to_client


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request wants to have generated."""

    prompt: tuple[int, ...]
    """At least one token."""
    most: int
    """New tokens, which have room behind the prompt."""
    sampling: Sampling
    seed: int | None
    """None: other tokens each time."""
    stop_ids: frozenset[int]


@dataclass(slots=True, eq=False)
class Generation:
    """A request that was taken. Used by the event loop, but for what the scheduler's thread changes."""

    asked: Asked
    loop: asyncio.AbstractEventLoop
    random: np.random.Generator
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    cached: int = 0
    """Tokens of the prompt whose keys and values were there already."""
    count: int = 0
    """Tokens that were generated."""
    is_given_up: bool = False
    _tokens: asyncio.Queue[int | Exception | None] = field(default_factory=asyncio.Queue)

    async def tokens(self) -> AsyncIterator[int]:
        """As they come. Raises what a run raises."""
        while (token := await self._tokens.get()) is not None:
            if isinstance(token, Exception):
                raise token
            yield token

    def give_up(self) -> None:
        """Generate no more: the client has gone, or what it asked for is complete."""
        self.is_given_up = True

    def tell(self, *tokens: int | Exception | None) -> None:
        """Tokens, an error, or None at the end; called by the scheduler's thread."""
        for token in tokens:
            self.loop.call_soon_threadsafe(self._tokens.put_nowait, token)

    def begin(self, cached: int) -> None:
        """Called by the scheduler's thread."""
        self.cached = cached
        self.loop.call_soon_threadsafe(self.begun.set)


@dataclass(slots=True)
class _Row:
    """A sequence of a session, and whose turn it is there."""

    session: GenerationSession
    index: int
    generation: Generation | None = None
    pending: list[int] = field(default_factory=list)
    """Tokens that are to be read next."""

    @property
    def sequence(self) -> tuple[int, ...]:
        return self.session.sequences[self.index]

    def keep(self, count: int) -> None:
        """Only the first tokens."""
        lengths = [len(each) for each in self.session.sequences]
        lengths[self.index] = count
        self.session.rewind(lengths)


class Scheduler:
    """Generates for as many requests at a time as there are sequences; others wait in the order they come.

    The memory of all sequences is there from the start. A request goes on from the sequence, of those that
    are free, which has most of its prompt, as the turns of a chat have. In each turn of a thread every
    session makes one run: of the tokens that its sequences read, at most those of its longest run.
    """

    def __init__(
        self, name: str, session: GenerationSession, sequences: int, queue: int, timeout_s: float
    ) -> None:
        """`sequences` is rounded up to a multiple of those that the decoder was compiled for."""
        batch = len(session.sequences)
        sessions = [session, *(session.fork() for _ in range(-(-sequences // batch) - 1))]
        self._name, self._queue, self._timeout_s = name, queue, timeout_s
        self._rows = [[_Row(each, index) for index in range(batch)] for each in sessions]
        self._waiting: deque[Generation] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=f"generate {name}", daemon=True)
        self._thread.start()

    @property
    def sequences(self) -> int:
        """Requests that are answered at a time."""
        return sum(map(len, self._rows))

    async def submit(self, asked: Asked) -> Generation:
        """The request when its turn has begun. Raises QueueFull, TimedOut or ModelNotReady."""
        generation = Generation(asked, asyncio.get_running_loop(), np.random.default_rng(asked.seed))
        with self._changed:
            if self._is_closed:
                raise ModelNotReady(self._name)
            is_free = any(row.generation is None for rows in self._rows for row in rows)
            if len(self._waiting) >= self._queue + is_free:
                raise QueueFull
            self._waiting.append(generation)
            self._changed.notify()
        try:
            async with asyncio.timeout(self._timeout_s):
                await generation.begun.wait()
        except TimeoutError:
            raise TimedOut(self._timeout_s) from None
        finally:
            if not generation.begun.is_set():
                generation.give_up()
        return generation

    async def close(self, grace_s: float) -> None:
        """Take no more requests, and end those that are not complete after `grace_s`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, grace_s)
        for generation in (*self._waiting, *(row.generation for rows in self._rows for row in rows)):
            if generation is not None:
                generation.begin(0)
                generation.tell(ModelNotReady(self._name))
                generation.give_up()
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._drop()
                self._admit()
                WAITING.labels(self._name).set(len(self._waiting))
                if not any(row.generation for rows in self._rows for row in rows):
                    if self._is_closed and not self._waiting:
                        return
                    self._changed.wait()
                    continue
            for rows in self._rows:
                if any(row.generation for row in rows):
                    self._step(rows)

    def _drop(self) -> None:
        """Free the sequences that nobody waits for any more."""
        self._waiting = deque(each for each in self._waiting if not each.is_given_up)
        for rows in self._rows:
            for row in rows:
                if row.generation is not None and row.generation.is_given_up:
                    row.generation, row.pending = None, []

    def _admit(self) -> None:
        """Give waiting requests the sequences that are free."""
        free = [row for rows in self._rows for row in rows if row.generation is None]
        while self._waiting and free:
            generation = self._waiting.popleft()
            prompt = generation.asked.prompt
            # a run needs a token to read
            shared = [min(_common(row.sequence, prompt), len(prompt) - 1) for row in free]
            best = int(np.argmax(shared))
            row, cached = free.pop(best), shared[best]
            row.keep(cached)
            row.generation, row.pending = generation, list(prompt[cached:])
            TOKENS.labels(self._name, "prompt").inc(len(row.pending))
            generation.begin(cached)

    def _step(self, rows: Sequence[_Row]) -> None:
        """One run of a session. An error ends the requests that took part in it."""
        try:
            self._advance(rows)
        except Exception as error:
            told = told_to_client(error) if isinstance(error, HybridcError) else error
            for row in rows:
                if row.generation is not None:
                    row.generation.tell(told)
                    row.generation, row.pending = None, []

    def _advance(self, rows: Sequence[_Row]) -> None:
        session, longest = rows[0].session, rows[0].session.longest_run
        for row in rows:
            if row.generation is None and len(row.sequence) + longest > session.context:
                row.keep(session.context - longest)  # a run writes behind every sequence, used or not
        parts = [row.pending[:longest] for row in rows]
        logits = session.append(parts)
        for row, part, found in zip(rows, parts, logits, strict=True):
            row.pending = row.pending[len(part) :]
            if row.generation is not None and not row.pending:
                self._choose(row, row.generation, found)

    def _choose(self, row: _Row, generation: Generation, logits: np.ndarray) -> None:
        asked = generation.asked
        token = choose(logits, row.sequence, asked.sampling, generation.random)
        generation.count += 1
        TOKENS.labels(self._name, "generated").inc()
        if generation.count == asked.most or token in asked.stop_ids:
            row.generation = None
            generation.tell(token, None)
        else:
            row.pending = [token]
            generation.tell(token)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differing[0]) if len(differing) else length
