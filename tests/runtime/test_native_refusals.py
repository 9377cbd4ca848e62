"""What the library's helper refuses by itself, whoever calls it: it writes nothing, and goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi

from hybridc import emulator
from hybridc.artifact import open_artifact
from hybridc.ir import Lane
from hybridc.runtime.code import open_library
from tests.runtime.conftest import EMULATED_BYTES

ARENA_BYTES = 256
GPU, CPU, TO_GPU, TO_HOST, NET = (lane.number for lane in Lane)
LARGEST = 2**63 - 1


class Helper:
    """The functions `hybridc_*` of a library."""

    def __init__(self, path: Path) -> None:
        self.library = open_library(open_artifact(path))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self.library.helper(name)


class Bench:
    """Lanes with an arena on the host, and with CUDA one on the GPU, filled with the numbers from 0 on."""

    def __init__(self, helper: Helper, *, cuda: bool) -> None:
        self.helper = helper
        self.host = helper.host_arena(ARENA_BYTES, cuda)
        np.from_dlpack(self.host)[:] = self.numbers
        self.gpu = helper.device_arena(0, ARENA_BYTES) if cuda else None
        if cuda:
            helper.upload(self.host, self.gpu)
        self.lanes = helper.open_lanes(cuda, 0, 1)

    @property
    def numbers(self) -> np.ndarray:
        return np.arange(ARENA_BYTES, dtype=np.uint8)

    def view(self, arena: Any, shape: tuple[int, ...] = (4,), offset_bytes: int = 0) -> Any:
        return self.helper.arena_view(arena, offset_bytes, shape, "float32")

    def assert_untouched(self) -> None:
        """Neither by what was refused nor by a run of the lanes."""
        self.helper.run(self.lanes)
        np.testing.assert_array_equal(np.from_dlpack(self.host), self.numbers)
        if self.gpu is not None:
            found = np.zeros(ARENA_BYTES, np.uint8)
            self.helper.upload(self.gpu, tvm_ffi.from_dlpack(found))
            np.testing.assert_array_equal(found, self.numbers)


@pytest.fixture
def bench(cpu_artifact: Path) -> Iterator[Bench]:
    helper = Helper(cpu_artifact)
    bench = Bench(helper, cuda=False)
    yield bench
    bench.assert_untouched()
    helper.close_lanes(bench.lanes)


@pytest.fixture
def gpu_bench(hybrid_artifact: Path) -> Iterator[Bench]:
    emulator.start(EMULATED_BYTES)
    helper = Helper(hybrid_artifact)
    bench = Bench(helper, cuda=True)
    yield bench
    bench.assert_untouched()
    helper.close_lanes(bench.lanes)
    bench.host = bench.gpu = None
    emulator.reset()


def negate(*_: Any) -> None:
    """A function that no step may come to call."""
    raise AssertionError("it was called")


@pytest.mark.parametrize(
    ("offset_bytes", "shape", "message"),
    [
        (-1, (1,), "leaves an arena"),
        (-LARGEST - 1, (1,), "leaves an arena"),
        (ARENA_BYTES - 3, (1,), "leaves an arena"),
        (ARENA_BYTES + 1, (0,), "leaves an arena"),
        (LARGEST, (1,), "leaves an arena"),
        (LARGEST - 3, (1,), "leaves an arena"),
        (0, (ARENA_BYTES // 4 + 1,), "leaves an arena"),
        (0, (2**61,), "too many elements"),
        (0, (2**40, 2**40), "too many elements"),
        (0, (2**40, 2**40, 0), "too many elements"),
        (0, (LARGEST,), "too many elements"),
        (0, (-1,), "negative"),
        (0, (-4, -4), "negative"),
    ],
)
def test_views_stay_in_their_arena(
    bench: Bench, offset_bytes: int, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bench.view(bench.host, shape, offset_bytes)


def test_views_of_views_stay_in_the_first(bench: Bench) -> None:
    part = bench.helper.arena_view(bench.host, 64, (16,), "uint8")
    assert np.from_dlpack(bench.helper.arena_view(part, 8, (8,), "uint8"))[0] == 72
    with pytest.raises(ValueError, match="leaves an arena of 16"):
        bench.helper.arena_view(part, 8, (9,), "uint8")


def test_arenas_have_possible_sizes(bench: Bench) -> None:
    with pytest.raises(ValueError, match="negative"):
        bench.helper.host_arena(-1, False)
    with pytest.raises(MemoryError, match="no memory for"):
        bench.helper.host_arena(2**60, False)


def test_arena_larger_than_the_gpu_is_refused(gpu_bench: Bench) -> None:
    for size_bytes in (EMULATED_BYTES, 2**60):
        with pytest.raises(RuntimeError):
            gpu_bench.helper.device_arena(0, size_bytes)
    with pytest.raises(ValueError, match="negative"):
        gpu_bench.helper.device_arena(0, -1)
    with pytest.raises(RuntimeError):
        gpu_bench.helper.device_arena(7, 16)
    with pytest.raises(RuntimeError):
        gpu_bench.helper.free_device_bytes(7)


@pytest.mark.parametrize("lane", [GPU, TO_GPU, TO_HOST, 5, -1, LARGEST, 2**32 + 1])
def test_without_a_gpu_there_are_the_lanes_of_cpu_and_network_alone(bench: Bench, lane: int) -> None:
    helper, array = bench.helper, bench.view(bench.host)
    with pytest.raises(ValueError, match="lane"):
        helper.add_call(bench.lanes, lane, (), negate, [array], -1)
    with pytest.raises(ValueError, match="lane"):
        helper.add_copy(bench.lanes, lane, (), array, array, -1)
    with pytest.raises(ValueError, match="no such lane"):
        helper.trace(bench.lanes, lane)


def test_without_a_gpu_events_are_numbered_as_with_one(bench: Bench) -> None:
    for waits, event, message in ((), 1, "numbered"), ((0,), -1, "no step"), ((-1,), -1, "no step"):
        with pytest.raises(ValueError, match=message):
            bench.helper.add_call(bench.lanes, CPU, waits, negate, [bench.view(bench.host)], event)


def test_network_is_called_by_a_thread_of_its_own_behind_what_it_waits_for(bench: Bench) -> None:
    helper, lanes, order = bench.helper, bench.lanes, []
    thread = threading.get_ident()
    for lane, waits, event in ((CPU, (), 0), (CPU, (), -1), (NET, (0,), -1)):
        noted = tvm_ffi.convert(lambda lane=lane: order.append((lane, threading.get_ident())))
        helper.add_call(lanes, lane, waits, noted, [], event)
    for _ in range(3):
        order.clear()
        helper.run(lanes)
        assert [lane for lane, _ in order].count(NET) == 1
        assert order.index(next(each for each in order if each[0] == NET)) > 0
        assert all((own == thread) is (lane == CPU) for lane, own in order)


def test_failure_of_the_network_ends_the_run_and_the_next_begins_afresh(bench: Bench) -> None:
    helper, lanes, failures = bench.helper, bench.lanes, [ValueError("lost the connection")]

    def call() -> None:
        if failures:
            raise failures.pop()

    helper.add_call(lanes, NET, (), tvm_ffi.convert(call), [], -1)
    with pytest.raises(ValueError, match="lost the connection"):
        helper.run(lanes)
    assert list(helper.failed_step(lanes)) == [NET, 0]
    assert helper.run(lanes) == -1


@pytest.mark.parametrize("lane", [TO_GPU, TO_HOST, 5, -1, LARGEST])
def test_lanes_of_copies_call_nothing(gpu_bench: Bench, lane: int) -> None:
    with pytest.raises(ValueError, match="lanes of kernels and the network"):
        gpu_bench.helper.add_call(gpu_bench.lanes, lane, (), negate, [], -1)


@pytest.mark.parametrize("lane", [GPU, CPU, NET, 5, -1, LARGEST])
def test_lanes_of_kernels_copy_nothing(gpu_bench: Bench, lane: int) -> None:
    source, target = gpu_bench.view(gpu_bench.host), gpu_bench.view(gpu_bench.gpu, offset_bytes=64)
    with pytest.raises(ValueError, match="lanes of their own"):
        gpu_bench.helper.add_copy(gpu_bench.lanes, lane, (), source, target, -1)


def test_lanes_take_arrays_of_their_own_device(gpu_bench: Bench) -> None:
    helper, lanes = gpu_bench.helper, gpu_bench.lanes
    host, gpu = gpu_bench.view(gpu_bench.host), gpu_bench.view(gpu_bench.gpu, offset_bytes=64)
    for lane, array in (GPU, host), (CPU, gpu):
        with pytest.raises(ValueError, match="not where its lane works"):
            helper.add_call(lanes, lane, (), negate, [array], -1)
    for lane, source, target in (
        (TO_GPU, gpu, host),
        (TO_HOST, host, gpu),
        (TO_GPU, host, host),
        (TO_HOST, gpu, gpu),
    ):
        with pytest.raises(ValueError, match="not where its lane works"):
            helper.add_copy(lanes, lane, (), source, target, -1)
    with pytest.raises(ValueError, match="not where its lane works"):
        helper.add_stream(lanes, (), gpu, host, -1)


def test_copies_are_of_one_size(gpu_bench: Bench) -> None:
    helper, lanes = gpu_bench.helper, gpu_bench.lanes
    source, target = gpu_bench.view(gpu_bench.host, (8,)), gpu_bench.view(gpu_bench.gpu, (7,), 64)
    for copy in (
        lambda: helper.add_copy(lanes, TO_GPU, (), source, target, -1),
        lambda: helper.add_stream(lanes, (), source, target, -1),
        lambda: helper.upload(source, target),
        lambda: helper.upload(target, source),
    ):
        with pytest.raises(ValueError, match="differ in size"):
            copy()


def test_arrays_with_gaps_are_refused(gpu_bench: Bench) -> None:
    gaps = tvm_ffi.from_dlpack(np.zeros((4, 2), np.float32)[:, 0])
    for lane, call in (CPU, gpu_bench.helper.add_call), (TO_GPU, gpu_bench.helper.add_copy):
        rest = (negate, [gaps]) if lane == CPU else (gaps, gpu_bench.view(gpu_bench.gpu))
        with pytest.raises(ValueError, match="not where its lane works"):
            call(gpu_bench.lanes, lane, (), *rest, -1)


def test_events_are_waited_for_after_they_are_recorded(gpu_bench: Bench) -> None:
    helper, lanes = gpu_bench.helper, gpu_bench.lanes
    arrays = gpu_bench.view(gpu_bench.host), gpu_bench.view(gpu_bench.gpu)  # the same bytes as before
    for event in (1, -2, LARGEST):
        with pytest.raises(ValueError, match="numbered in the order"):
            helper.add_copy(lanes, TO_GPU, (), *arrays, event)
    helper.add_copy(lanes, TO_GPU, (), *arrays, 0)
    with pytest.raises(ValueError, match="numbered in the order"):
        helper.add_copy(lanes, TO_GPU, (), *arrays, 0)
    for waits in ((1,), (0, 1), (-1,), (LARGEST,)):
        with pytest.raises(ValueError, match="no step before records"):
            helper.add_copy(lanes, TO_HOST, waits, *reversed(arrays), -1)
    helper.add_copy(lanes, TO_HOST, (0, 0), *reversed(arrays), 1)


def test_slots_divide_their_memory(gpu_bench: Bench) -> None:
    helper, lanes = gpu_bench.helper, gpu_bench.lanes
    pinned = helper.host_arena(32, True)
    for count in (0, -1, 33, LARGEST):
        with pytest.raises(ValueError, match="so many slots"):
            helper.set_slots(lanes, pinned, count)
    helper.set_slots(lanes, pinned, 3)
    with pytest.raises(ValueError, match="so many slots"):
        helper.set_slots(lanes, pinned, 3)
    arrays = gpu_bench.view(gpu_bench.host, (24,)), gpu_bench.view(gpu_bench.gpu, (24,))
    helper.add_stream(lanes, (), *arrays, -1)  # by way of slots of 10 bytes


def test_faults_are_pairs_of_numbers_on_the_host(gpu_bench: Bench) -> None:
    helper, lanes = gpu_bench.helper, gpu_bench.lanes
    with pytest.raises(ValueError, match="two numbers"):
        helper.set_faults(lanes, helper.arena_view(gpu_bench.host, 0, (3,), "int64"))
    with pytest.raises(ValueError, match="not where its lane works"):
        helper.set_faults(lanes, helper.arena_view(gpu_bench.gpu, 0, (2,), "int64"))


@pytest.mark.parametrize("value", [0, 1])
def test_a_step_whose_guard_does_not_hold_is_left_out(bench: Bench, value: int) -> None:
    helper, called = bench.helper, []
    condition = helper.arena_view(bench.host, value, (1,), "bool")  # the arena's bytes count from 0
    for wanted in (True, False):
        note = tvm_ffi.convert(lambda _, wanted=wanted: called.append(wanted))
        helper.add_call(bench.lanes, CPU, (), note, [bench.view(bench.host)], -1)
        helper.guard_step(bench.lanes, CPU, [condition, condition], [int(wanted)] * 2)
    helper.run(bench.lanes)
    assert called == [bool(value)]


def test_guards_that_cannot_be_are_refused(gpu_bench: Bench) -> None:
    helper, lanes = gpu_bench.helper, gpu_bench.lanes
    condition = helper.arena_view(gpu_bench.host, 0, (1,), "bool")
    with pytest.raises(ValueError, match="no step"):
        helper.guard_step(lanes, TO_GPU, [condition], [1])
    helper.add_copy(lanes, TO_GPU, (), gpu_bench.view(gpu_bench.host), gpu_bench.view(gpu_bench.gpu), -1)
    helper.guard_step(lanes, TO_GPU, [condition], [1])  # which is 0: nothing is copied
    with pytest.raises(ValueError, match="no value"):
        helper.guard_step(lanes, TO_GPU, [condition], [])
    with pytest.raises(ValueError, match="one byte"):
        helper.guard_step(lanes, TO_GPU, [gpu_bench.view(gpu_bench.host)], [1])
    with pytest.raises(ValueError, match="not where its lane works"):
        helper.guard_step(lanes, TO_GPU, [helper.arena_view(gpu_bench.gpu, 0, (1,), "bool")], [1])
    with pytest.raises(ValueError, match="no such lane"):
        helper.guard_step(lanes, 5, [condition], [1])


def test_arguments_of_other_types_are_refused(bench: Bench) -> None:
    helper, lanes, array = bench.helper, bench.lanes, bench.view(bench.host)
    for name, arguments in (
        ("add_call", ()),
        ("add_call", ("text", CPU, (), negate, [array], -1)),
        ("add_call", (lanes, CPU, (), None, [array], -1)),
        ("add_call", (lanes, CPU, (), negate, [1], -1)),
        ("add_call", (lanes, CPU, (), negate, array, -1)),
        ("add_call", (lanes, CPU, (0.5,), negate, [array], -1)),
        ("add_copy", (lanes, CPU, (), None, array, -1)),
        ("add_stream", (lanes, (), array, 7, -1)),
        ("add_call", (lanes, CPU, (), negate, [None], -1)),
        ("set_slots", (lanes, array)),
        ("set_slots", (lanes, None, 1)),
        ("pinned_view", (0, None, 0, (1,), "float32")),
        ("set_faults", (lanes, None)),
        ("arena_view", (None, 0, (1,), "float32")),
        ("arena_view", (bench.host, 0.5, (1,), "float32")),
        ("arena_view", (bench.host, 0, 1, "float32")),
        ("upload", (array, None)),
        ("run", (None,)),
    ):
        with pytest.raises((TypeError, ValueError)):
            getattr(helper, name)(*arguments)


def test_kernel_refuses_arrays_that_are_not_its_parameters(bench: Bench) -> None:
    """By its entry in the library; the run fails, and so does the next one."""
    relu = bench.helper.library.function("relu_cpu")
    lanes = bench.helper.open_lanes(False, 0, 1)
    for arrays in (
        [],
        [bench.view(bench.host)],
        [bench.view(bench.host, (4, 5)), bench.view(bench.host, (4, 5))],
        [bench.helper.arena_view(bench.host, 0, (4, 6), dtype) for dtype in ("int32", "float32")],
    ):
        bench.helper.add_call(lanes, CPU, (), relu, arrays, -1)
        for _ in range(2):
            with pytest.raises((TypeError, ValueError, RuntimeError)):
                bench.helper.run(lanes)
    bench.helper.close_lanes(lanes)
