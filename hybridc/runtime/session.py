"""Run an artifact with the manners of onnxruntime's InferenceSession."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from hybridc.artifact.load import Artifact, open_artifact
from hybridc.artifact.manifest import Port
from hybridc.errors import ArtifactError, PlanError, UsageError, exhaustion_told
from hybridc.ir import Check, Device
from hybridc.ir.bind import Binding, BindingError, bind
from hybridc.ir.verify import verify
from hybridc.options import check_threads
from hybridc.runtime.code import open_library
from hybridc.runtime.faults import check_fed
from hybridc.runtime.forks import claim_gpu
from hybridc.runtime.io_binding import IoBinding
from hybridc.runtime.places import places, tensors
from hybridc.runtime.ports import (
    ModelMetadata,
    NodeArg,
    as_port,
    checked_feed,
    listed,
    model_metadata,
    node_arg,
    port_dtype,
    port_type,
)
from hybridc.runtime.program import LoadedProgram, free_gpu_bytes, gpu_page_bytes
from hybridc.targets import available_threads


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device: what the plan promised, and what was allocated."""

    planned_bytes: int
    allocated_bytes: int
    mapped_weight_bytes: int = 0
    """Weights in the artifact's file; pages of those that are read in a run are loaded when used."""
    staging_bytes: int = 0
    """Pinned memory beside the arena, from which streamed weights are copied to the GPU."""


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    gpu_memory_bytes: int | None = None,
    host_memory_bytes: int | None = None,
    check_weights: bool = True,
) -> Session:
    """Open an artifact and make it ready to run.

    Of its plans the one of the largest budget that fits the GPU's free memory is taken; or, with
    `gpu_memory_bytes`, that of the largest budget that is not more. `threads` limits the CPU's kernels; the
    default is the artifact's own limit, else every core this process may use. `host_memory_bytes` limits
    arena and staging on the host likewise; beyond it, or beyond half of what is available, streamed weights
    are read from the artifact's file during a run.
    `check_weights=False` trusts the weights file's bytes, which saves reading them all.
    Raises ArtifactError, DeviceError or UsageError.
    """
    return Session(
        path,
        threads=threads,
        gpu_memory_bytes=gpu_memory_bytes,
        host_memory_bytes=host_memory_bytes,
        check_weights=check_weights,
    )


class Session:
    """A loaded artifact. Arenas are allocated here, once; a run allocates nothing on a device.

    Runs from several threads are done one after the other. Several sessions may be open at once. A process
    that is forked has a copy of it, unless the plan needs the GPU: then UsageError HC559 refuses to use it.
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
        wanted = None if threads is None else check_threads(threads)
        artifact = open_artifact(path, check_weights=check_weights)
        if gpu_memory_bytes is not None:
            artifact = artifact.within(gpu_memory_bytes)
        verify_plans(artifact)
        library = open_library(artifact)
        if gpu_memory_bytes is None and len(artifact.plans) > 1 and artifact.has_gpu_code:
            artifact = artifact.fitting(free_gpu_bytes(library), gpu_page_bytes())
        count = check_threads(wanted or artifact.manifest.threads or available_threads())
        limit_bytes = artifact.manifest.host_memory_bytes if host_memory_bytes is None else host_memory_bytes
        self._artifact = artifact
        self._lock = threading.Lock()
        self._runs = ThreadPoolExecutor(1, "hybridc")
        _sessions.add(self)
        self._tensors = tensors(artifact)
        self._input_checks = _input_checks(artifact)
        self._places = places(artifact, Device.CPU)
        self._gpu_places = places(artifact, Device.GPU)
        binding = bind_plan(artifact)
        self._threads = count
        new_program = functools.partial(LoadedProgram, artifact, binding, library, count, limit_bytes)
        self._new_program: Callable[[], LoadedProgram] | None = new_program
        self._program: LoadedProgram | None = new_program()

    def __repr__(self) -> str:
        ports = self.get_inputs(), self.get_outputs()
        inputs, outputs = (", ".join(f"{p.name} {p.shape}" for p in each) for each in ports)
        return f"<Session {self._artifact.path.name}: {inputs} -> {outputs}>"

    @property
    def artifact(self) -> Artifact:
        """What is loaded, with the plan that runs."""
        return self._artifact

    @property
    def threads(self) -> int:
        """How many run the CPU's kernels."""
        return self._threads

    def get_modelmeta(self) -> ModelMetadata:
        """What is known of the model, as onnxruntime tells it."""
        return model_metadata(self._artifact.manifest)

    def get_inputs(self) -> list[NodeArg]:
        return [node_arg(port) for port in self._artifact.manifest.inputs]

    def get_outputs(self) -> list[NodeArg]:
        return [node_arg(port) for port in self._artifact.manifest.outputs]

    @exhaustion_told()
    def run(
        self,
        output_names: Sequence[str] | None,
        feeds: Mapping[str, np.ndarray],
        *,
        kept: Collection[str] = (),
    ) -> list[np.ndarray]:
        """Compute outputs, in the order asked for; None asks for all of them.

        Inputs in `kept` are not fed: they are what the arrays of `places` hold, or what is on the GPU.
        Raises UsageError: HC551 unknown input, HC552 missing input, HC553 wrong dtype, HC554 wrong shape,
        HC555 unknown output, HC556 closed session, HC559 the GPU of a process that forked this one, HC560 a
        value that a node does not allow: an index outside of its bounds, or a divisor of 0; HC581 a label
        that its loss has no class for.
        """
        outputs = self._requested(output_names)
        arrays = self._checked(feeds, kept)
        with self._lock:
            program = self._open_program()
            self._put_inputs(program, arrays)
            program.run()
            return [self._found(port, program, arrays).copy() for port in outputs]

    def io_binding(self) -> IoBinding:
        """A binding of the caller's arrays, for `run_with_iobinding`."""
        return IoBinding()

    @exhaustion_told()
    def run_with_iobinding(self, binding: IoBinding) -> None:
        """Run with the inputs of a binding, and fill its outputs.

        Raises UsageError as `run` does; HC553 or HC554 where an output is bound to an array of another type
        or shape, and HC554 where the size of an output follows from data and it is bound to an array at all.
        """
        outputs = self._requested(binding.output_names)
        targets = [binding.target(port, port_dtype(port.dtype)) for port in outputs]
        with self._lock:
            program = self._open_program()
            arrays = self._checked(binding.feeds(program))
            self._put_inputs(program, arrays)
            program.run()
            for port, target in zip(outputs, targets, strict=True):
                result = self._found(port, program, arrays)
                if target is not None:
                    np.copyto(target, result)
                binding.put(port.name, result.copy() if target is None else target, program)

    def run_async(
        self,
        output_names: Sequence[str] | None,
        feeds: Mapping[str, np.ndarray],
        callback: Callable[[list[np.ndarray], object, str], None] | None = None,
        user_data: object = None,
    ) -> Future[list[np.ndarray]]:
        """Begin a run and return at once: runs are done in the order in which they were asked for.

        The future has the outputs or the error of `run`. `callback(outputs, user_data, error)` is called by
        another thread at the end, as onnxruntime does: with no outputs and the error's text where it failed.
        The feeds must stay as they are until then. Raises UsageError HC556 of a closed session.
        """
        try:
            future = self._runs.submit(self.run, output_names, feeds)
        except RuntimeError:  # the pool is shut down
            raise self._closed() from None
        if callback is not None:
            future.add_done_callback(functools.partial(_call_back, callback, user_data))
        return future

    def warm_up(self, runs: int = 2) -> None:
        """Run on zeros, so that later runs find all code loaded, and from the second on CUDA graphs made.

        Raises as `run` does, but for HC560: a divisor may not be 0.
        """
        inputs = self._artifact.manifest.inputs
        feeds = {port.name: np.zeros(port.shape, port_dtype(port.dtype)) for port in inputs}
        for _ in range(runs):
            try:
                self.run([], feeds)
            except UsageError as error:
                if error.code != "HC560":
                    raise

    def places(self, outputs: Mapping[str, str]) -> dict[str, np.ndarray]:
        """Of inputs, and the outputs that replace them from run to run, those that share a place on the host.

        By the input's name, the array there: a run reads its old value and leaves the new one. Valid until
        the session is closed or its memory released. Raises UsageError HC556.
        """
        ports = {port.name: port for port in self._artifact.manifest.inputs}
        with self._lock:
            host = self._open_program().host_bytes
        found = {name: self._places.get((self._tensors[name], True)) for name in outputs}
        return {
            name: as_port(host[place], ports[name])
            for name, place in found.items()
            if place is not None and place == self._places.get((self._tensors[outputs[name]], False))
        }

    def residents(self, outputs: Mapping[str, str]) -> frozenset[str]:
        """Of inputs, and the outputs that replace them from run to run, those that stay on the GPU.

        By the input's name: it need not be fed again (`kept`), nor the output be asked for. What is there is
        lost when the session is closed or its memory released.
        """
        before = {t for t, is_before in self._gpu_places if is_before}
        carried = dict(self._artifact.graph.loop_carried)
        pairs = ((name, self._tensors[name], self._tensors[output]) for name, output in outputs.items())
        return frozenset(name for name, old, new in pairs if old in before and carried.get(old) == new)

    def resident(self, name: str) -> np.ndarray:
        """A copy of what is on the GPU of one of `residents`. Raises UsageError HC556, DeviceError HC407."""
        [port] = (port for port in self._artifact.manifest.inputs if port.name == name)
        with self._lock:
            return self._from_gpu(self._open_program(), port, is_before=True)

    @exhaustion_told()
    def measure(self, feeds: Mapping[str, np.ndarray]) -> tuple[tuple[float, float], ...]:
        """Run once, and tell when each step of the plan began and ended: microseconds since the run's start.

        The clocks of CPU and GPU are put together to some microseconds. Later runs are a little slower.
        Raises UsageError as `run` does.
        """
        arrays = self._checked(feeds)
        with self._lock:
            program = self._open_program()
            self._put_inputs(program, arrays)
            spans = {lane: iter(spans) for lane, spans in program.run_traced().items()}
        return tuple(next(spans[step.lane]) for step in self._artifact.plan.steps)

    def memory(self) -> dict[Device, DeviceMemory]:
        """Planned and really allocated bytes of each device."""
        plan = self._artifact.plan
        with self._lock:
            allocated = self._open_program().allocated()
        return {
            Device.GPU: DeviceMemory(plan.arena_bytes(Device.GPU), allocated.gpu_bytes),
            Device.CPU: DeviceMemory(
                plan.arena_bytes(Device.CPU),
                allocated.host_bytes,
                allocated.mapped_weight_bytes,
                allocated.staging_bytes,
            ),
        }

    def release(self) -> None:
        """Free the memory of all devices until the next run, which takes as much again.

        For programs that take turns: what was read, checked and loaded stays, but for weights on the GPU.
        A run raises DeviceError HC405 or HC408 where others have taken the memory in the meantime.
        """
        with self._lock:
            self._free()

    def close(self) -> None:
        """Free everything, and drop runs of `run_async` that have not begun; closing twice does no harm."""
        self._runs.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._free()
            self._new_program = None
            self._artifact.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _closed(self) -> UsageError:
        where = str(self._artifact.path)
        return UsageError("HC556", "the session is closed", where=where, remedy="load the artifact again")

    def _free(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None

    def _open_program(self) -> LoadedProgram:
        if self._new_program is None:
            raise self._closed()
        if self._artifact.needs_gpu:
            claim_gpu()
        if self._program is None:
            self._program = self._new_program()
        return self._program

    def _put_inputs(self, program: LoadedProgram, arrays: Mapping[str, np.ndarray]) -> None:
        host = program.host_bytes
        for port in self._artifact.manifest.inputs:
            tensor = self._tensors[port.name]
            place = self._places.get((tensor, True))
            if place is not None and tensor in arrays:
                as_port(host[place], port)[...] = arrays[tensor]
            elif (tensor, True) in self._gpu_places and tensor in arrays:
                program.put_on_gpu(self._gpu_places[tensor, True].start, arrays[tensor])

    def _from_gpu(self, program: LoadedProgram, port: Port, *, is_before: bool) -> np.ndarray:
        place = self._gpu_places[self._tensors[port.name], is_before]
        return as_port(program.get_from_gpu(place.start, place.stop - place.start), port)

    def _requested(self, names: Sequence[str] | None) -> list[Port]:
        ports = {port.name: port for port in self._artifact.manifest.outputs}
        if names is None:
            return list(self._artifact.manifest.outputs)
        if not isinstance(names, Collection) or isinstance(names, str | bytes):
            remedy = f"pass [{names!r}]" if isinstance(names, str) else "pass a list of names"
            raise UsageError("HC555", f"output names must be a list, not {names!r}", remedy=remedy)
        for name in names:
            if not isinstance(name, str) or name not in ports:
                raise UsageError("HC555", f"unknown output {name!r}", remedy=f"outputs are {listed(ports)}")
        return [ports[name] for name in names]

    def _checked(self, feeds: Mapping[str, np.ndarray], kept: Collection[str] = ()) -> dict[str, np.ndarray]:
        """The feeds by tensor name, each known, complete and of the right type."""
        ports = {port.name: port for port in self._artifact.manifest.inputs}
        if not isinstance(feeds, Mapping):
            raise UsageError(
                "HC551",
                f"feeds must be a dictionary, not a {type(feeds).__name__}",
                remedy="pass {name: array}",
            )
        for name in feeds:
            if name not in ports:
                raise UsageError("HC551", f"unknown input {name!r}", remedy=f"inputs are {listed(ports)}")
        for name, port in ports.items():
            if name not in feeds and name not in kept:
                raise UsageError("HC552", f"input {name!r} is missing", remedy=f"feed {port_type(port)}")
        arrays = {self._tensors[name]: checked_feed(ports[name], array) for name, array in feeds.items()}
        for tensor, array in arrays.items():
            check_fed(array, self._input_checks.get(tensor, ()))
        return arrays

    def _found(self, port: Port, program: LoadedProgram, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        """The elements of an output that there are, where data say how many: valid until another run."""
        array, counts = self._whole(port, program, feeds), self._artifact.manifest.counts
        for cut in port.cuts:
            count = int(self._whole(counts[cut.count], program, feeds).item())
            # a damaged artifact may compute anything
            array = array[(slice(None),) * cut.axis + (slice(max(count, 0)),)]
        return array

    def _whole(self, port: Port, program: LoadedProgram, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        """An output in its largest size. It may be an input, whose place may be taken by now, or a weight."""
        tensor = self._tensors[port.name]
        if tensor in feeds:
            return feeds[tensor].reshape(port.shape)
        place = self._places.get((tensor, False))
        if place is not None:
            return as_port(program.host_bytes[place], port)
        if (tensor, False) in self._gpu_places:
            return self._from_gpu(program, port, is_before=False)
        stored = self._artifact.stored_plan.host_weights
        weight = next(w for w in stored if w.tensor == tensor and not w.layout)
        return as_port(program.weight_bytes(weight), port)


def verify_plans(artifact: Artifact) -> None:
    """Let the verifier check every plan of an artifact. Raises ArtifactError HC306."""
    try:
        for graph, plan in zip(artifact.graphs, artifact.plans, strict=True):
            verify(graph, plan)
    except PlanError as error:
        what = f"its plan is rejected ({error.code}): {error.what}"
        raise ArtifactError("HC306", what, where=error.where, remedy="compile the model again") from error


def bind_plan(artifact: Artifact) -> Binding:
    """What a run of the chosen plan does, with the weights that the artifact stores for it.

    Requires: `verify_plans`. Raises ArtifactError HC306 where the plan does not fit functions and weights.
    """
    stored = artifact.stored_plan
    try:
        binding = bind(artifact.graph, artifact.plan, artifact.manifest.signatures)
        for wanted, found in (
            (binding.host_weights, stored.host_weights),
            (binding.streamed_weights, stored.streamed_weights),
            ([r.weight for r in binding.resident_weights], stored.gpu_weights),
        ):
            missing = set(wanted) - {weight.weight for weight in found}
            if missing:
                raise BindingError(f"{min(map(str, missing))} is not stored as it is read", "weights")
    except BindingError as error:
        what = f"its plan does not fit its functions: {error.what} ({error.where})"
        raise ArtifactError(
            "HC306", what, where=str(artifact.path), remedy="compile the model again"
        ) from error
    return binding


def _input_checks(artifact: Artifact) -> dict[str, tuple[Check, ...]]:
    """By input, as a tensor, what kernels check of it: it is checked before the run writes anything."""
    made = [check for kernel in artifact.graph.kernels for check in kernel.checks]
    found = {name: tuple(check for check in made if check.tensor == name) for name in artifact.graph.inputs}
    return {name: checks for name, checks in found.items() if checks}


def _call_back(
    callback: Callable[[list[np.ndarray], object, str], None],
    user_data: object,
    future: Future[list[np.ndarray]],
) -> None:
    """Tell the outcome of a run as onnxruntime does."""
    if future.cancelled():
        callback([], user_data, "the session was closed")
    elif (error := future.exception()) is not None:
        callback([], user_data, str(error))
    else:
        callback(future.result(), user_data, "")


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _unlock_sessions() -> None:
    """In a process that was just forked: the threads that held locks are not here."""
    for session in list(_sessions):
        session._lock = threading.Lock()
        session._runs = ThreadPoolExecutor(1, "hybridc")


os.register_at_fork(after_in_child=_unlock_sessions)
