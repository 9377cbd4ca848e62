"""What happens in the process of `test_scheduler.py`.

`python -m tests.serving.chat.scenarios NAME...` tells, as JSON, with which traceback each one failed.

The decoder is a stand-in for GenerationSession whose runs wait until they are let go on.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from kserve.errors import InvalidInput, ModelNotReady

from hybridc.errors import UsageError
from hybridc.generation import Sampling
from hybridc.serving.chat.scheduler import Asked, Scheduler
from hybridc.serving.refusals import QueueFull, TimedOut

CONTEXT, VOCABULARY, LONGEST = 64, 16, 4


class Steps:
    """A decoder of some sequences whose next token is the last one and one more."""

    context, vocabulary, longest_run = CONTEXT, VOCABULARY, LONGEST

    def __init__(self, batch: int, allowed: threading.Semaphore) -> None:
        self.sequences: list[tuple[int, ...]] = [()] * batch
        self.allowed = allowed
        self.runs: list[list[list[int]]] = []
        self.error: Exception | None = None

    def append(self, parts: Sequence[Sequence[int]]) -> np.ndarray:
        self.allowed.acquire()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.runs.append([list(part) for part in parts])
        logits = np.zeros((len(parts), VOCABULARY), np.float32)
        for row, part in enumerate(parts):
            assert len(part) <= LONGEST and len(self.sequences[row]) + LONGEST <= CONTEXT
            self.sequences[row] += tuple(part)
            if part:
                logits[row, (part[-1] + 1) % VOCABULARY] = 1
        return logits

    def rewind(self, lengths: Sequence[int]) -> None:
        self.sequences = [each[:n] for each, n in zip(self.sequences, lengths, strict=True)]

    def fork(self) -> Steps:
        return Steps(len(self.sequences), self.allowed)


def scheduler(batch: int, sequences: int, *, runs: int, queue: int = 8, timeout_s: float = 60.0) -> Any:
    """A scheduler, its decoder and what lets runs go on, so many of which may."""
    allowed = threading.Semaphore(runs)
    decoder: Any = Steps(batch, allowed)
    return Scheduler("steps", decoder, sequences, queue, timeout_s), decoder, allowed


def asked(prompt: Sequence[int], most: int = 3) -> Any:
    return Asked(tuple(prompt), most, Sampling(), None, frozenset())


async def taken(generation: Any) -> list[int]:
    return [token async for token in generation.tokens()]


def rows_go_on_together_and_prompts_are_read_in_parts() -> None:
    async def main() -> None:
        made, decoder, allowed = scheduler(2, 2, runs=0)
        first = asyncio.create_task(made.submit(asked([1, 2, 3, 4, 5, 6], 2)))
        second = asyncio.create_task(made.submit(asked([9], 4)))
        await asyncio.sleep(0)  # both wait for their turn now; a run may have begun for the first alone
        allowed.release(50)
        generations = await asyncio.gather(first, second)
        assert [await taken(each) for each in generations] == [[7, 8], [10, 11, 12, 13]]
        assert all(len(part) <= LONGEST for run in decoder.runs for part in run)
        assert any(all(run) for run in decoder.runs)
        third = await made.submit(asked([1, 2, 3, 4, 5, 6, 7, 9], 1))
        assert await taken(third) == [10] and third.cached == 7
        await made.close(60)

    asyncio.run(main())


def who_leaves_makes_room() -> None:
    async def main() -> None:
        made, decoder, allowed = scheduler(1, 1, runs=1)
        first = await made.submit(asked([1], 30))
        waits = asyncio.create_task(made.submit(asked([5], 1)))
        gone = asyncio.create_task(made.submit(asked([7], 30)))
        assert await anext(first.tokens()) == 2
        first.give_up()
        gone.cancel()
        await asyncio.wait([gone])
        allowed.release(2)
        assert await taken(await waits) == [6]
        assert (
            sum(map(len, decoder.runs)) <= 3
        )  # of the first at most one that was under way, and none of `gone`
        await made.close(60)

    asyncio.run(main())


def errors_end_what_took_part_in_the_run() -> None:
    async def main() -> None:
        made, decoder, allowed = scheduler(1, 1, runs=0)
        generation = await made.submit(asked([1]))
        decoder.error = UsageError("HC593", "logits are not numbers")
        allowed.release(50)
        with pytest.raises(InvalidInput, match="HC593"):
            await taken(generation)
        assert await taken(await made.submit(asked([3], 2))) == [4, 5]
        await made.close(60)

    asyncio.run(main())


def queues_end_and_so_does_waiting() -> None:
    async def main() -> None:
        made, _, allowed = scheduler(1, 1, runs=0, queue=1, timeout_s=0.2)
        first = await made.submit(asked([1]))
        second = asyncio.create_task(made.submit(asked([2])))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await made.submit(asked([3]))
        with pytest.raises(TimedOut):
            await second
        closing = asyncio.create_task(made.close(0.1))
        with pytest.raises(ModelNotReady):
            await taken(first)
        allowed.release(50)  # a run that has begun is not ended
        await closing
        with pytest.raises(ModelNotReady):
            await made.submit(asked([4]))

    asyncio.run(main())


def idle_sequences_leave_room_for_runs() -> None:
    async def main() -> None:
        made, decoder, _ = scheduler(2, 2, runs=200)
        full = await made.submit(asked(range(15), CONTEXT - LONGEST - 15))
        await taken(full)
        decoder.sequences[1 - decoder.sequences.index(())] += (0,) * (CONTEXT - len(decoder.sequences[0]) - 2)
        assert await taken(await made.submit(asked([3], 2))) == [4, 5]  # the stand-in asserts the room
        await made.close(60)

    asyncio.run(main())


SCENARIOS = (
    rows_go_on_together_and_prompts_are_read_in_parts,
    who_leaves_makes_room,
    errors_end_what_took_part_in_the_run,
    queues_end_and_so_does_waiting,
    idle_sequences_leave_room_for_runs,
)


def failure(scenario: Callable[[], None]) -> str | None:
    """The traceback, if there is one."""
    try:
        scenario()
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    named = {each.__name__: each for each in SCENARIOS}
    print(json.dumps({name: failure(named[name]) for name in sys.argv[1:]}))
