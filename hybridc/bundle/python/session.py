"""Run a bundle with the manners of onnxruntime's InferenceSession, as hybridc.runtime runs artifacts."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from . import library
from .descriptions import BucketInfo, DeviceMemory, ModelMetadata, NodeArg
from .errors import ArtifactError, UsageError, exhaustion_told
from .io_binding import IoBinding
from .ports import Port, cut, input_array, listed, output_array, port_of

_MAXIMUM_THREADS = 4096
_LARGEST_BYTES = 2**63 - 1


class Device(StrEnum):
    """A place where kernels run and buffers live."""

    GPU = "gpu"
    CPU = "cpu"


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    gpu_memory_bytes: int | None = None,
    host_memory_bytes: int | None = None,
    check_weights: bool = True,
) -> Session:
    """Open a bundle, the folder that `hybridc bundle` has written, and make it ready to run.

    Of its plans the one of the largest budget that fits the GPU's free memory is taken; or, with
    `gpu_memory_bytes`, that of the largest budget that is not more. `threads` limits the CPU's kernels; the
    default is the bundle's own limit, else every core this process may use. `host_memory_bytes` limits arena
    and staging on the host likewise. `check_weights=False` trusts the weights file's bytes, which saves
    reading them all. Raises ArtifactError, DeviceError or UsageError.
    """
    return Session(
        path,
        threads=threads,
        gpu_memory_bytes=gpu_memory_bytes,
        host_memory_bytes=host_memory_bytes,
        check_weights=check_weights,
    )


class Session:
    """A bundle that is ready to run. Arenas are allocated once; a run allocates nothing on a device.

    Runs from several threads are done one after the other. Several sessions may be open at once. In a process
    that was forked UsageError HC559 refuses to use it.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        threads: int | None = None,
        gpu_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        check_weights: bool = True,
    ) -> None:
        self._path = Path(path)
        options = library.Options(
            ctypes.sizeof(library.Options),
            0 if threads is None else _checked_threads(threads),
            0 if check_weights else 1,
            0 if gpu_memory_bytes is None else _checked_bytes(gpu_memory_bytes),
            0 if host_memory_bytes is None else _checked_bytes(host_memory_bytes),
        )
        folder = os.fsencode(self._path)
        if b"\0" in folder:
            raise ArtifactError("HC301", "no path has a zero byte", remedy="name the bundle's folder")
        handle = ctypes.c_void_p()
        library.call("open", folder, options, handle)
        self._handle = handle
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _close, handle, self._process)
        self._lock = threading.Lock()
        self._runs = ThreadPoolExecutor(1, "hybridc")
        self._inputs = _ports(handle, "input")
        self._outputs = _ports(handle, "output")

    def __repr__(self) -> str:
        ports = self.get_inputs(), self.get_outputs()
        inputs, outputs = (", ".join(map(str, each)) for each in ports)
        return f"<Session {self._path.name}: {inputs} -> {outputs}>"

    @property
    def threads(self) -> int:
        """How many run the CPU's kernels."""
        return int(self._told("thread_count"))

    def get_modelmeta(self) -> ModelMetadata:
        """What is known of the model, as onnxruntime tells it."""
        model = library.Model()
        self._told("get_model", model)
        known = {
            "source_sha256": model.sha256.decode(),
            "opset": str(model.opset),
            "target": model.target.decode(),
            "hybridc": model.hybridc_version.decode(),
            "tvm": model.tvm_version.decode(),
            "tvm_ffi": model.tvm_ffi_version.decode(),
        }
        return ModelMetadata("hybridc", model.name.decode(), "", "", "", 0, known)

    def get_inputs(self) -> list[NodeArg]:
        return [port.node_arg for port in self._inputs.values()]

    def get_outputs(self) -> list[NodeArg]:
        return [port.node_arg for port in self._outputs.values()]

    def buckets(self) -> list[BucketInfo]:
        """Memory and predicted time of the plan: there is a single bucket, without sizes."""
        memory = self._memory()
        predicted_us = self._told("predicted_us")
        return [BucketInfo({}, memory.gpu_planned_bytes, memory.host_planned_bytes, predicted_us)]

    @exhaustion_told()
    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Compute outputs, in the order asked for; None asks for all of them.

        Raises UsageError: HC551 unknown input, HC552 missing input, HC553 wrong dtype, HC554 wrong shape,
        HC555 unknown output, HC556 closed session, HC559 another process's session, HC560 a value that a node
        does not allow: an index outside of its bounds, or a divisor of 0.
        """
        ports = self._requested(output_names)
        return self._run(ports, self._checked(feeds), [None] * len(ports))

    def io_binding(self) -> IoBinding:
        """A binding of the caller's arrays, for `run_with_iobinding`."""
        return IoBinding()

    @exhaustion_told()
    def run_with_iobinding(self, binding: IoBinding) -> None:
        """Run with the inputs of a binding, and fill its outputs.

        Raises UsageError as `run` does; HC553 or HC554 where an output is bound to an array of another type
        or shape, and HC554 where the size of an output follows from data and it is bound to an array at all.
        """
        ports = self._requested(binding.output_names)
        targets = [binding.target(port) for port in ports]
        direct = [t if t is not None and t.flags.c_contiguous else None for t in targets]
        results = self._run(ports, self._checked(binding.inputs), direct)
        for port, result in zip(ports, results, strict=True):
            binding.put(port.name, result)

    @exhaustion_told()
    def run_async(
        self,
        output_names: Sequence[str] | None,
        feeds: Mapping[str, np.ndarray],
        callback: Callable[[list[np.ndarray], object, str], None] | None = None,
        user_data: object = None,
    ) -> Future[list[np.ndarray]]:
        """Begin a run and return at once: runs are done in the order in which they were asked for.

        The future has the outputs or the error of `run`. `callback(outputs, user_data, error)` is called by
        another thread at the end, as onnxruntime does: with no outputs and the error's text where it failed;
        or by the thread that cancels the future, or closes the session, before the run has begun.
        The feeds must stay as they are until then. Raises UsageError HC556 of a closed session, HC559 of one
        of another process, DeviceError HC412 where there is no memory for the thread.
        """
        self._check_process()
        ready = threading.Event()  # what is done calls back in the thread that adds the callback, this one

        def run() -> list[np.ndarray]:
            ready.wait()
            return self.run(output_names, feeds)

        try:
            future = self._runs.submit(run)
        except RuntimeError as error:
            if "shutdown" not in str(error):
                raise
            raise self._closed() from None
        try:
            if callback is not None:
                future.add_done_callback(functools.partial(_call_back, callback, user_data))
        finally:
            ready.set()
        return future

    def warm_up(self, runs: int = 2) -> None:
        """Run the plan on zeros, so that later runs find all code loaded, and from the second on CUDA graphs
        made.

        Raises as `run` does, but for HC560: a divisor may not be 0.
        """
        feeds = {name: np.zeros(port.shape, port.array_dtype) for name, port in self._inputs.items()}
        for _ in range(runs):
            try:
                self.run([], feeds)
            except UsageError as error:
                if error.code != "HC560":
                    raise

    @exhaustion_told()
    def measure(self, feeds: Mapping[str, np.ndarray]) -> tuple[tuple[float, float], ...]:
        """Run once, and tell when each step of the plan began and ended: microseconds since the run's start.

        The clocks of CPU and GPU are put together to some microseconds. Later runs are a little slower.
        Raises UsageError as `run` does.
        """
        arrays = self._checked(feeds)
        inputs = _structures(library.InputArray, [input_array(*each) for each in arrays])
        steps = (library.Step * self._told("step_count"))()
        self._told("measure", inputs, len(inputs), steps)
        return tuple((step.begin_us, step.end_us) for step in steps)

    def memory(self) -> dict[Device, DeviceMemory]:
        """Planned and really allocated bytes of each device."""
        told = self._memory()
        return {
            Device.GPU: DeviceMemory(told.gpu_planned_bytes, told.gpu_allocated_bytes),
            Device.CPU: DeviceMemory(
                told.host_planned_bytes,
                told.host_allocated_bytes,
                told.mapped_weight_bytes,
                told.staging_bytes,
            ),
        }

    def close(self) -> None:
        """Free everything, and drop runs of `run_async` that have not begun; closing twice does no harm."""
        self._runs.shutdown(wait=False, cancel_futures=True)
        if self._process == os.getpid():
            with self._lock:
                self._finalizer()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _told(self, name: str, *arguments: Any) -> Any:
        """What a function of the library tells of the session."""
        self._check_process()
        with self._lock:
            if not self._finalizer.alive:
                raise self._closed()
            return library.call(name, self._handle, *arguments)

    def _memory(self) -> library.Memory:
        memory = library.Memory()
        self._told("get_memory", memory)
        return memory

    def _check_process(self) -> None:
        if self._process != os.getpid():
            what, remedy = "the session was opened before this process was forked", "load the bundle in it"
            raise UsageError("HC559", what, where=str(self._path), remedy=remedy)

    def _closed(self) -> UsageError:
        return UsageError(
            "HC556", "the session is closed", where=str(self._path), remedy="load the bundle again"
        )

    def _run(
        self,
        ports: Sequence[Port],
        feeds: Sequence[tuple[Port, np.ndarray]],
        targets: Sequence[np.ndarray | None],
    ) -> list[np.ndarray]:
        """Outputs, in the arrays of `targets` where there are any, else in fresh ones."""
        arrays = [
            np.empty(port.shape, port.array_dtype) if target is None else target
            for port, target in zip(ports, targets, strict=True)
        ]
        inputs = _structures(library.InputArray, [input_array(*each) for each in feeds])
        outputs = _structures(
            library.OutputArray, [output_array(*each) for each in zip(ports, arrays, strict=True)]
        )
        self._told("run", inputs, len(inputs), outputs, len(outputs))
        return [cut(array, made) for array, made in zip(arrays, outputs, strict=True)]

    def _requested(self, names: Sequence[str] | None) -> list[Port]:
        if names is None:
            return list(self._outputs.values())
        if not isinstance(names, Collection) or isinstance(names, str | bytes):
            remedy = f"pass [{names!r}]" if isinstance(names, str) else "pass a list of names"
            raise UsageError("HC555", f"output names must be a list, not {names!r}", remedy=remedy)
        for name in names:
            if not isinstance(name, str) or name not in self._outputs:
                remedy = f"outputs are {listed(self._outputs)}"
                raise UsageError("HC555", f"unknown output {name!r}", remedy=remedy)
        return [self._outputs[name] for name in names]

    def _checked(self, feeds: Mapping[str, np.ndarray]) -> list[tuple[Port, np.ndarray]]:
        """Inputs and contiguous arrays of the machine's byte order; types, shapes and values the library
        checks."""
        if not isinstance(feeds, Mapping):
            what = f"feeds must be a dictionary, not a {type(feeds).__name__}"
            raise UsageError("HC551", what, remedy="pass {name: array}")
        for name in feeds:
            if name not in self._inputs:
                remedy = f"inputs are {listed(self._inputs)}"
                raise UsageError("HC551", f"unknown input {name!r}", remedy=remedy)
        return [(self._inputs[name], _plain(self._inputs[name], feed)) for name, feed in feeds.items()]


def _plain(port: Port, feed: Any) -> np.ndarray:
    try:
        array = np.asarray(feed)
        return np.asarray(array, array.dtype.newbyteorder("="), order="C")
    except ValueError:
        what = f"input {port.name!r} is not an array"
        raise UsageError("HC553", what, remedy=f"feed {port.type}") from None


def _structures(kind: Any, each: Sequence[ctypes.Structure]) -> Any:
    return (kind * len(each))(*each)


def _ports(handle: ctypes.c_void_p, kind: str) -> dict[str, Port]:
    """Inputs or outputs by their names, in the model's order."""
    ports = []
    for index in range(library.call(f"{kind}_count", handle)):
        told = library.Port()
        library.call(kind, handle, index, told)
        ports.append(port_of(told))
    return {port.name: port for port in ports}


def _checked_threads(count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MAXIMUM_THREADS:
        what = f"threads must be from 1 to {_MAXIMUM_THREADS}, not {count!r}"
        raise UsageError("HC557", what, remedy="omit threads to use every core")
    return count


def _checked_bytes(amount: int) -> int:
    if isinstance(amount, bool) or not isinstance(amount, int) or amount < 1:
        raise UsageError("HC510", f"{amount!r} is no amount of memory", remedy="give a number of bytes")
    return min(amount, _LARGEST_BYTES)


def _close(handle: ctypes.c_void_p, process: int) -> None:
    """Threads and a GPU of a process that forked this one are not here, and nothing may be done to them."""
    if os.getpid() == process:
        library.call("close", handle)


def _call_back(
    callback: Callable[[list[np.ndarray], object, str], None],
    user_data: object,
    future: Future[list[np.ndarray]],
) -> None:
    """Tell the outcome of a run as onnxruntime does."""
    if future.cancelled():
        callback([], user_data, "the run was cancelled before it began")
    elif (error := future.exception()) is not None:
        callback([], user_data, str(error))
    else:
        callback(future.result(), user_data, "")
