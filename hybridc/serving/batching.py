"""Requests of one model: they wait in a queue, and run alone or joined along an open dimension."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from kserve.errors import ModelNotReady

from hybridc.errors import UsageError
from hybridc.serving.metrics import REQUESTS_PER_RUN, WAITING
from hybridc.serving.refusals import QueueFull, TimedOut

Feeds = Mapping[str, np.ndarray]
Outputs = list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the dimension along which requests are joined."""

    intervals: tuple[tuple[int, int], ...]

    @property
    def largest(self) -> int:
        return max(high for _, high in self.intervals)

    def at_least(self, size: int) -> int:
        """The smallest size there is that is not less than this one, which is at most the largest."""
        return min(max(low, size) for low, high in self.intervals if size <= high)


@dataclass(slots=True, eq=False)
class _Waiting:
    feeds: Feeds
    result: asyncio.Future[Outputs]

    @property
    def rows(self) -> int:
        """Its size along the first axis."""
        return len(next(iter(self.feeds.values())))

    @property
    def others(self) -> dict[str, tuple[int, ...]]:
        """Sizes that must be equal where requests are joined."""
        return {name: array.shape[1:] for name, array in self.feeds.items()}


@dataclass(slots=True)
class Queue:
    """Runs requests in the order in which they come, in a thread of its own.

    While one run is under way others wait, and those in front of the queue that fit together are the next
    run. So requests are joined where the model is busy, and wait for nothing where it is not; `delay_s` lets
    a run that is not full wait for more. Used by one event loop.
    """

    name: str
    run: Callable[[Feeds], Outputs]
    """All outputs of the model."""
    limit: int
    timeout_s: float
    sizes: Sizes | None
    """None: requests are not joined."""
    delay_s: float
    _waiting: deque[_Waiting] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _full: asyncio.Event = field(default_factory=asyncio.Event)
    _worker: asyncio.Task[None] | None = None
    _is_closed: bool = False

    async def submit(self, feeds: Feeds) -> Outputs:
        """Results of a request. Raises QueueFull, TimedOut, ModelNotReady, or what `run` raises."""
        if self._is_closed:
            raise ModelNotReady(self.name)
        if len(self._waiting) >= self.limit:
            raise QueueFull
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        result: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()
        request = _Waiting(feeds, result)
        self._waiting.append(request)
        self._arrived.set()
        self._note_full()
        WAITING.labels(self.name).set(len(self._waiting))
        try:
            async with asyncio.timeout(self.timeout_s):
                return await result
        except TimeoutError:
            raise TimedOut(self.timeout_s) from None
        finally:
            if request in self._waiting:  # it was given up, and another may have its place
                self._waiting.remove(request)

    async def close(self, grace_s: float) -> None:
        """Take no more requests, run those that wait, and drop what is left after `grace_s`."""
        self._is_closed = True
        self._arrived.set()
        self._note_full()
        if self._worker is not None:
            await asyncio.wait([self._worker], timeout=grace_s)
            self._worker.cancel()
        for each in self._waiting:
            if not each.result.done():
                each.result.set_exception(ModelNotReady(self.name))

    async def _work(self) -> None:
        thread, loop = ThreadPoolExecutor(1, f"run {self.name}"), asyncio.get_running_loop()
        try:
            while self._waiting or not self._is_closed:
                await self._arrived.wait()
                if self.sizes is not None and self.delay_s:
                    await self._wait_for_more()
                taken = self._take()
                if taken:
                    await loop.run_in_executor(thread, self._run_all, loop, taken)
        finally:
            thread.shutdown(wait=False)

    async def _wait_for_more(self) -> None:
        """Until there are enough requests for a full run, or no more can come, or the delay is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.delay_s):
                await self._full.wait()

    def _note_full(self) -> None:
        """Tell `_wait_for_more`."""
        if self.sizes is None:
            return
        rows = sum(each.rows for each in self._waiting)
        if self._is_closed or rows >= self.sizes.largest:
            self._full.set()
        else:
            self._full.clear()

    def _take(self) -> list[_Waiting]:
        """Those in front that are one run; empty if none of them is still waited for."""
        taken: list[_Waiting] = []
        while self._waiting and (not taken or self._joins(taken)):
            first = self._waiting.popleft()
            if not first.result.done():  # its client has gone, or it has waited for too long
                taken.append(first)
        if not self._waiting:
            self._arrived.clear()
        self._note_full()
        WAITING.labels(self.name).set(len(self._waiting))
        return taken

    def _joins(self, taken: Sequence[_Waiting]) -> bool:
        """Whether the request in front can be run together with these."""
        first = self._waiting[0]
        return (
            self.sizes is not None
            and sum(each.rows for each in taken) + first.rows <= self.sizes.largest
            and first.others == taken[0].others
        )

    def _run_all(self, loop: asyncio.AbstractEventLoop, taken: Sequence[_Waiting]) -> None:
        REQUESTS_PER_RUN.labels(self.name).observe(len(taken))
        try:
            results: Sequence[Outputs | Exception] = self._together([each.feeds for each in taken])
        except Exception as error:
            # of a value that is not allowed, whose request is not known; or it is what all of them meet
            alone = len(taken) > 1 and isinstance(error, UsageError)
            results = [self._alone(each.feeds) for each in taken] if alone else [error] * len(taken)
        loop.call_soon_threadsafe(_answer, taken, results)

    def _alone(self, feeds: Feeds) -> Outputs | Exception:
        try:
            return self._together([feeds])[0]
        except Exception as error:
            return error

    def _together(self, requests: Sequence[Feeds]) -> list[Outputs]:
        if self.sizes is None:
            return [self.run(feeds) for feeds in requests]
        rows = [len(next(iter(feeds.values()))) for feeds in requests]
        return split(self.run(joined(requests, self.sizes.at_least(sum(rows)))), rows)


def _answer(taken: Sequence[_Waiting], results: Sequence[Outputs | Exception]) -> None:
    for each, result in zip(taken, results, strict=True):
        if each.result.done():
            continue
        if isinstance(result, Exception):
            each.result.set_exception(result)
        else:
            each.result.set_result(result)


def joined(requests: Sequence[Feeds], size: int) -> Feeds:
    """Arrays of requests one behind the other along the first axis, and the first row again up to `size`."""
    return {name: _joined([feeds[name] for feeds in requests], size) for name in requests[0]}


def _joined(arrays: Sequence[np.ndarray], size: int) -> np.ndarray:
    padding = size - sum(map(len, arrays))
    if len(arrays) == 1 and padding == 0:
        return arrays[0]
    first = arrays[0][:1]
    return np.concatenate([*arrays, np.broadcast_to(first, (padding, *first.shape[1:]))])


def split(outputs: Outputs, rows: Sequence[int]) -> list[Outputs]:
    """Of the outputs of joined requests, those of each, which has so many rows."""
    ends = np.cumsum(rows)
    return [[array[end - count : end] for array in outputs] for count, end in zip(rows, ends, strict=True)]
