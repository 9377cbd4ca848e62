"""Lazy streams: work happens as late as CUDA allows, so that a forgotten wait shows."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.emulator.conftest import restart
from tests.support.gpu_program import (
    BLOCKING,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    NON_BLOCKING,
    CudaError,
    Program,
    address,
    allocate,
    call,
    copy,
    create,
    download,
    release,
)

pytestmark = pytest.mark.usefixtures("device")

SOURCE = """
extern "C" __global__ void fill(float* x, float value) { x[threadIdx.x] = value; }
extern "C" __global__ void add(float* x, float* y) { y[threadIdx.x] = x[threadIdx.x] + 1.0f; }
"""
BYTES = 128


@pytest.fixture(autouse=True)
def lazy(device: None) -> None:
    restart(lazy_streams=True)


@pytest.fixture
def program() -> Program:
    return Program(SOURCE)


@pytest.fixture
def streams() -> Iterator[list[ctypes.c_void_p]]:
    handles = [create("cudaStreamCreateWithFlags", NON_BLOCKING) for _ in range(2)]
    yield handles
    for handle in handles:
        call("cudaStreamDestroy", handle)


def event() -> ctypes.c_void_p:
    return create("cudaEventCreateWithFlags", 2)


def pinned(values: NDArray[np.float32]) -> tuple[ctypes.c_void_p, NDArray[np.float32]]:
    pointer = create("cudaMallocHost", ctypes.c_size_t(values.nbytes))
    assert pointer.value is not None
    view = np.ctypeslib.as_array((ctypes.c_float * values.size).from_address(pointer.value))
    view[:] = values
    return pointer, view


@pytest.mark.parametrize("waits", [False, True])
def test_only_a_wait_orders_two_streams(
    program: Program, streams: list[ctypes.c_void_p], waits: bool
) -> None:
    x, y, ready = allocate(BYTES), allocate(BYTES), event()
    program.launch("fill", [x, ctypes.c_float(2)], stream=streams[0])
    call("cudaEventRecord", ready, streams[0])
    if waits:
        call("cudaStreamWaitEvent", streams[1], ready, 0)
    program.launch("add", [x, y], stream=streams[1])
    result = download(y, 32, streams[1])
    assert (result == 3).all() if waits else np.isnan(result).all()


def test_wait_is_for_the_record_before_it(program: Program, streams: list[ctypes.c_void_p]) -> None:
    x, y, ready = allocate(BYTES), allocate(BYTES), event()
    program.launch("fill", [x, ctypes.c_float(2)], stream=streams[0])
    call("cudaEventRecord", ready, streams[0])
    call("cudaStreamWaitEvent", streams[1], ready, 0)
    program.launch("fill", [x, ctypes.c_float(5)], stream=streams[0])
    call("cudaEventRecord", ready, streams[0])
    program.launch("add", [x, y], stream=streams[1])
    assert (download(y, 32, streams[1]) == 3).all()


def test_wait_on_a_never_recorded_event_does_nothing(
    program: Program, streams: list[ctypes.c_void_p]
) -> None:
    x = allocate(BYTES)
    call("cudaStreamWaitEvent", streams[1], event(), 0)
    program.launch("fill", [x, ctypes.c_float(1)], stream=streams[1])
    assert (download(x, 32, streams[1]) == 1).all()


def test_waiting_for_an_event_runs_no_more_than_it_covers(
    program: Program, streams: list[ctypes.c_void_p]
) -> None:
    x, ready = allocate(BYTES), event()
    program.launch("fill", [x, ctypes.c_float(1)], stream=streams[0])
    call("cudaEventRecord", ready, streams[0])
    program.launch("fill", [x, ctypes.c_float(2)], stream=streams[0])
    call("cudaEventSynchronize", ready)
    assert (download(x, 32, streams[1]) == 1).all()
    call("cudaStreamSynchronize", streams[0])
    assert (download(x, 32, streams[1]) == 2).all()


def test_event_has_the_time_at_which_its_stream_reached_it(
    program: Program, streams: list[ctypes.c_void_p]
) -> None:
    x, before, after = allocate(BYTES), *(create("cudaEventCreateWithFlags", 0) for _ in range(2))
    call("cudaEventRecord", before, streams[0])
    program.launch("fill", [x, ctypes.c_float(2)], stream=streams[0])
    call("cudaEventRecord", after, streams[0])
    elapsed = ctypes.c_float()
    with pytest.raises(CudaError):  # cudaErrorNotReady: nothing has run yet
        call("cudaEventElapsedTime", ctypes.byref(elapsed), before, after)
    call("cudaEventSynchronize", before)
    time.sleep(0.2)  # the kernel runs when it is waited for, as late as CUDA allows
    call("cudaEventSynchronize", after)
    call("cudaEventElapsedTime", ctypes.byref(elapsed), before, after)
    assert elapsed.value >= 200, "milliseconds: the host's pause lies between the two"


def test_default_stream_waits_for_blocking_streams_only(
    program: Program, streams: list[ctypes.c_void_p]
) -> None:
    blocking = create("cudaStreamCreateWithFlags", BLOCKING)
    x, y = allocate(BYTES), allocate(BYTES)
    program.launch("fill", [x, ctypes.c_float(1)], stream=blocking)
    program.launch("fill", [y, ctypes.c_float(1)], stream=streams[0])
    assert (download(x, 32) == 1).all()
    assert np.isnan(download(y, 32)).all()
    call("cudaStreamDestroy", blocking)


def test_blocking_stream_waits_for_the_default_stream(program: Program) -> None:
    blocking = create("cudaStreamCreateWithFlags", BLOCKING)
    x, y = allocate(BYTES), allocate(BYTES)
    program.launch("fill", [x, ctypes.c_float(1)])
    program.launch("add", [x, y], stream=blocking)
    assert (download(y, 32, blocking) == 2).all()
    call("cudaStreamDestroy", blocking)


def test_pageable_upload_may_be_overwritten_and_pinned_may_not(streams: list[ctypes.c_void_p]) -> None:
    pageable = np.ones(32, np.float32)
    pointer, view = pinned(np.ones(32, np.float32))
    x, y = allocate(BYTES), allocate(BYTES)
    copy(x, address(pageable), BYTES, HOST_TO_DEVICE, streams[0])
    copy(y, pointer, BYTES, HOST_TO_DEVICE, streams[0])
    pageable[:] = view[:] = 9
    assert (download(x, 32, streams[0]) == 1).all()
    assert (download(y, 32, streams[0]) == 9).all()
    call("cudaFreeHost", pointer)


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_synchronous_upload_of_pageable_memory_may_end_after_the_call(
    program: Program, streams: list[ctypes.c_void_p], is_pinned: bool, waits: bool
) -> None:
    pageable = np.ones(32, np.float32)
    pointer, _ = pinned(pageable)
    x, y = allocate(BYTES), allocate(BYTES)
    source = pointer if is_pinned else address(pageable)
    call("cudaMemcpy", x, source, ctypes.c_size_t(BYTES), HOST_TO_DEVICE)
    if waits:
        call("cudaStreamSynchronize", None)
    program.launch("add", [x, y], stream=streams[0])
    result = download(y, 32, streams[0])
    assert (result == 2).all() if is_pinned or waits else np.isnan(result).all()
    call("cudaFreeHost", pointer)


def test_pinned_download_comes_late_and_pageable_at_once(
    program: Program, streams: list[ctypes.c_void_p]
) -> None:
    x = allocate(BYTES)
    program.launch("fill", [x, ctypes.c_float(1)], stream=streams[0])
    pointer, view = pinned(np.zeros(32, np.float32))
    copy(pointer, x, BYTES, DEVICE_TO_HOST, streams[0])
    assert (view == 0).all()
    assert (download(x, 32, streams[0]) == 1).all()
    assert (view == 1).all()
    call("cudaFreeHost", pointer)


def test_releasing_memory_finishes_the_work_on_it(program: Program, streams: list[ctypes.c_void_p]) -> None:
    x, y = allocate(BYTES), allocate(BYTES)
    program.launch("fill", [x, ctypes.c_float(1)], stream=streams[0])
    program.launch("add", [x, y], stream=streams[0])
    release(x)
    assert (download(y, 32, streams[1]) == 2).all()


@pytest.mark.parametrize("lazy_streams", [False, True])
def test_several_host_threads_may_use_the_device_at_once(program: Program, lazy_streams: bool) -> None:
    restart(lazy_streams=lazy_streams)

    def work(number: int) -> bool:
        stream = create("cudaStreamCreateWithFlags", NON_BLOCKING)
        done, x, y = event(), allocate(BYTES), allocate(BYTES)
        pointer, view = pinned(np.zeros(BYTES // 4, np.float32))
        for value in range(20):
            assert program.launch("fill", [x, ctypes.c_float(100 * number + value)], stream=stream) == 0
            assert program.launch("add", [x, y], stream=stream) == 0
            copy(pointer, y, BYTES, DEVICE_TO_HOST, stream)
            call("cudaEventRecord", done, stream)
            call("cudaEventSynchronize", done)
            if not np.all(view == 100 * number + value + 1):
                return False
        call("cudaFreeHost", pointer)
        call("cudaEventDestroy", done)
        call("cudaStreamDestroy", stream)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
