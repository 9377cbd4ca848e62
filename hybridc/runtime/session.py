"""Run an artifact with the manners of onnxruntime's InferenceSession."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np

from hybridc.artifact.load import Artifact, open_artifact
from hybridc.errors import ArtifactError, PlanError, UsageError, drop_locals, exhaustion_told
from hybridc.ir import Device
from hybridc.ir.verify import verify
from hybridc.options import check_threads
from hybridc.runtime.code import open_library
from hybridc.runtime.collectives import Collectives
from hybridc.runtime.descriptions import BucketInfo, DeviceMemory, ModelMetadata, NodeArg
from hybridc.runtime.feeds import Shapes
from hybridc.runtime.forks import claim_gpu
from hybridc.runtime.io_binding import IoBinding
from hybridc.runtime.memory import Memory, device_errors, free_gpu_bytes, gpu_page_bytes, step_errors
from hybridc.runtime.plan_view import PlanView
from hybridc.runtime.ports import listed, model_metadata, node_arg, port_dtype
from hybridc.runtime.program import LoadedProgram
from hybridc.targets import available_threads


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    gpu_memory_bytes: int | None = None,
    host_memory_bytes: int | None = None,
    check_weights: bool = True,
    trusted_keys: Sequence[str | Path] | None = None,
) -> Session:
    """Open an artifact and make it ready to run.

    Of its plans the one of the largest budget that fits the GPU's free memory is taken; or, with
    `gpu_memory_bytes`, that of the largest budget that is not more. `threads` limits the CPU's kernels; the
    default is the artifact's own limit, else every core this process may use. `host_memory_bytes` limits
    arena and staging on the host likewise; beyond it, or beyond half of what is available, streamed weights
    are read from the artifact's file during a run. `check_weights=False` trusts the weights file's bytes,
    which saves reading them all. `trusted_keys` are files with ed25519 public keys: an owner of one of them
    must have signed the artifact. Raises ArtifactError, DeviceError or UsageError.
    """
    return Session(
        path,
        threads=threads,
        gpu_memory_bytes=gpu_memory_bytes,
        host_memory_bytes=host_memory_bytes,
        check_weights=check_weights,
        trusted_keys=trusted_keys,
    )


class Session:
    """A loaded artifact. Arenas are allocated here, once; a run allocates nothing on a device.

    Where dimensions are open, a run takes the plan of the smallest bucket that its sizes are in. All plans
    work in the same arenas, of the size that the largest needs.

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
        trusted_keys: Sequence[str | Path] | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        self._collectives = collectives
        wanted = None if threads is None else check_threads(threads)
        artifact = open_artifact(path, check_weights=check_weights, trusted_keys=trusted_keys)
        try:
            self._prepare(artifact, wanted, gpu_memory_bytes, host_memory_bytes)
        except BaseException as error:
            drop_locals(error)
            artifact.close()
            raise

    def _prepare(
        self,
        artifact: Artifact,
        threads: int | None,
        gpu_memory_bytes: int | None,
        host_memory_bytes: int | None,
    ) -> None:
        """Check an artifact, choose its plan, and take the memory for it."""
        if gpu_memory_bytes is not None:
            artifact = artifact.within(gpu_memory_bytes)
        verify_plans(artifact)
        library = open_library(artifact)
        if gpu_memory_bytes is None and len(artifact.plans) > 1 and artifact.has_gpu_code:
            artifact = artifact.fitting(free_gpu_bytes(library), gpu_page_bytes())
        if self._collectives is not None:
            artifact = self._collectives.added_to(artifact)
            verify_plans(artifact)
        count = check_threads(threads or artifact.manifest.threads or available_threads())
        limit_bytes = artifact.manifest.host_memory_bytes if host_memory_bytes is None else host_memory_bytes
        plans = artifact.in_buckets()
        reserve = functools.partial(Memory, plans, library, limit_bytes)
        self._open(artifact, plans, reserve, count)

    def _open(
        self,
        artifact: Artifact,
        plans: Sequence[Artifact],
        reserve: Callable[[], Memory],
        threads: int,
        lock: threading.Lock | None = None,
    ) -> None:
        """Have these plans of an artifact, one for each bucket of sizes, ready to run."""
        self._artifact = artifact
        self._lock = lock or threading.Lock()
        self._runs = _one_thread()
        self._shapes = Shapes(artifact.manifest)
        self._ports = {port.name: port for port in artifact.manifest.inputs}
        self._positions = {port.name: i for i, port in enumerate(artifact.manifest.outputs)}
        self._plans = tuple(PlanView(each) for each in plans)
        self._needs_gpu = any(each.needs_gpu for each in plans)
        self._reserve: Callable[[], Memory] | None = reserve
        self._threads = threads
        self._programs: tuple[LoadedProgram, ...] = ()
        self._memory: Memory | None = None
        self._held: PlanView | None = None
        """The plan whose resident weights are on the GPU."""
        self._load(self._reserve)
        _sessions.add(self)

    def __repr__(self) -> str:
        ports = self.get_inputs(), self.get_outputs()
        inputs, outputs = (", ".join(map(str, each)) for each in ports)
        return f"<Session {self._artifact.path.name}: {inputs} -> {outputs}>"

    @property
    def artifact(self) -> Artifact:
        """What is loaded, with the plan that runs; with that for the largest sizes, if some are open."""
        return self._artifact

    def artifact_for(self, feeds: Mapping[str, np.ndarray]) -> Artifact:
        """What is loaded, with the plan that a run of these feeds takes. Raises UsageError as `run` does."""
        return self._checked(feeds)[0].artifact

    @property
    def threads(self) -> int:
        """How many run the CPU's kernels."""
        return self._threads

    def get_modelmeta(self) -> ModelMetadata:
        """What is known of the model, as onnxruntime tells it."""
        return model_metadata(self._artifact.manifest)

    def get_inputs(self) -> list[NodeArg]:
        return [node_arg(port, self._shapes.open_axes(port)) for port in self._artifact.manifest.inputs]

    def get_outputs(self) -> list[NodeArg]:
        manifest = self._artifact.manifest
        return [node_arg(port, self._shapes.open_results(i)) for i, port in enumerate(manifest.outputs)]

    def buckets(self) -> list[BucketInfo]:
        """Sizes, memory and predicted time of each bucket; a single one without sizes if none are open."""
        names = [each.name for each in self._artifact.manifest.dimensions]
        return [
            BucketInfo(
                {name: (i.low, i.high) for name, i in zip(names, view.artifact.interface.sizes, strict=True)},
                view.artifact.plan.arena_bytes(Device.GPU),
                view.artifact.plan.arena_bytes(Device.CPU),
                view.artifact.plan.makespan_us,
            )
            for view in self._plans
        ]

    _collectives: Collectives | None = None

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
        view, arrays = self._checked(feeds, kept)
        with self._lock:
            memory, program = self._open_program(view)
            view.put(memory, arrays)
            program.run()
            results = [view.output(position, memory, arrays).copy() for position in outputs]
            view.artifact.check_weights()  # else they may be of what was written meanwhile
            return results

    def io_binding(self) -> IoBinding:
        """A binding of the caller's arrays, for `run_with_iobinding`."""
        return IoBinding()

    @exhaustion_told()
    def run_with_iobinding(self, binding: IoBinding) -> None:
        """Run with the inputs of a binding, and fill its outputs.

        Raises UsageError as `run` does; HC553 or HC554 where an output is bound to an array of another type
        or shape, and HC554 where the size of an output follows from data, or from sizes of the inputs that
        are smaller than their bucket's, and it is bound to an array at all.
        """
        outputs = self._requested(binding.output_names)
        with self._lock:
            view, arrays = self._checked(binding.feeds(self._open_memory()))
            ports = [view.outputs[position] for position in outputs]
            targets = [binding.target(port, port_dtype(port.dtype)) for port in ports]
            memory, program = self._open_program(view)
            view.put(memory, arrays)
            program.run()
            for position, port, target in zip(outputs, ports, targets, strict=True):
                result = view.output(position, memory, arrays)
                if target is not None:
                    np.copyto(target, result)
                binding.put(port.name, result.copy() if target is None else target, memory)
            view.artifact.check_weights()

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
        The feeds must stay as they are until then. Raises UsageError HC556 of a closed session, DeviceError
        HC412 where there is no memory for the thread.
        """
        ready = (
            threading.Event()
        )  # a future that is done calls in the thread that adds the callback, this one

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
        """Run each plan on zeros, so that later runs find all code loaded, but for branches that zeros do not
        take, and from the second on CUDA graphs made.

        Raises as `run` does, but for HC560 and HC586: a divisor may not be 0, and a loop may not end.
        """
        for view in self._plans:
            feeds = {port.name: np.zeros(port.shape, port_dtype(port.dtype)) for port in view.inputs}
            for _ in range(runs):
                try:
                    self.run([], feeds)
                except UsageError as error:
                    if error.code not in ("HC560", "HC586"):
                        raise

    def places(
        self, outputs: Mapping[str, str], feeds: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Of inputs, and the outputs that replace them from run to run, those that share a place on the host.

        By the input's name, the array there: a run reads its old value and leaves the new one. With several
        plans, that of a run of `feeds`; a run by another plan leaves something else there. Valid until the
        session is closed or its memory released. Raises UsageError HC556, or as `run` does for the feeds.
        """
        view = self._view(feeds)
        with self._lock:
            memory, _ = self._open_program(view)
            return view.shared_places(memory, outputs)

    def residents(
        self, outputs: Mapping[str, str], feeds: Mapping[str, np.ndarray] | None = None
    ) -> frozenset[str]:
        """Of inputs, and the outputs that replace them from run to run, those that stay on the GPU, or in
        parts where they are.

        By the input's name: it need not be fed again (`kept`), nor the output be asked for. With several
        plans, those of a run of `feeds`; a run by another plan leaves something else there. What is there is
        lost when the session is closed or its memory released. Raises UsageError as `run` does for the feeds.
        """
        return self._view(feeds).residents(outputs)

    def resident(self, name: str) -> np.ndarray:
        """A copy of one of `residents` of the plan that ran last.

        Raises UsageError HC556, DeviceError HC407.
        """
        with self._lock:
            view = self._held or self._plans[-1]
            memory, _ = self._open_program(view)
            return view.resident(memory, self._ports[name])

    def _view(self, feeds: Mapping[str, np.ndarray] | None) -> PlanView:
        """The plan of a run of these feeds, which may be left out where there is only one."""
        if feeds is not None:
            return self._checked(feeds)[0]
        [view] = self._plans
        return view

    @exhaustion_told()
    def measure(self, feeds: Mapping[str, np.ndarray]) -> tuple[tuple[float, float], ...]:
        """Run once, and tell when each step of the plan began and ended: microseconds since the run's start.

        The clocks of CPU and GPU are put together to some microseconds. Later runs are a little slower.
        Raises UsageError as `run` does.
        """
        view, arrays = self._checked(feeds)
        with self._lock:
            memory, program = self._open_program(view)
            view.put(memory, arrays)
            spans = {lane: iter(spans) for lane, spans in program.run_traced().items()}
        return tuple(next(spans[step.lane]) for step in view.artifact.plan.steps)

    def memory(self) -> dict[Device, DeviceMemory]:
        """Planned and really allocated bytes of each device."""
        plans = [view.artifact.plan for view in self._plans]
        with self._lock:
            allocated = self._open_memory().allocated()
        return {
            Device.GPU: DeviceMemory(max(p.arena_bytes(Device.GPU) for p in plans), allocated.gpu_bytes),
            Device.CPU: DeviceMemory(
                max(p.arena_bytes(Device.CPU) for p in plans),
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
            self._reserve = None
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
        for program in self._programs:
            program.close()
        if self._memory is not None:
            self._memory.close()
        self._programs, self._memory, self._held = (), None, None

    def _load(self, reserve: Callable[[], Memory]) -> None:
        self._memory = memory = reserve()
        try:
            self._hold(memory, self._plans[-1])
            for view in self._plans:
                self._programs = (*self._programs, self._load_program(memory, view))
        except BaseException as error:
            self._free()
            drop_locals(error)
            raise

    def _load_program(self, memory: Memory, view: PlanView) -> LoadedProgram:
        beside = self._programs[0] if self._programs else None
        return LoadedProgram(memory, view.artifact, view.binding, self._threads, self._collectives, beside)

    def _hold(self, memory: Memory, view: PlanView) -> None:
        if self._held is not view:
            self._held = None  # until all of its weights are there
            with device_errors(), step_errors(view.artifact):
                memory.hold(view.artifact)
            self._held = view

    def _open_memory(self) -> Memory:
        if self._reserve is None:
            raise self._closed()
        if self._needs_gpu:
            claim_gpu()
        if self._memory is None:
            self._load(self._reserve)
        assert self._memory is not None
        return self._memory

    def _open_program(self, view: PlanView) -> tuple[Memory, LoadedProgram]:
        """The memory, which holds what the plan needs, and the plan."""
        memory = self._open_memory()
        self._hold(memory, view)
        return memory, self._programs[self._plans.index(view)]

    def _requested(self, names: Sequence[str] | None) -> list[int]:
        """Positions of outputs."""
        positions = self._positions
        if names is None:
            return list(range(len(self._artifact.manifest.outputs)))
        if not isinstance(names, Collection) or isinstance(names, str | bytes):
            remedy = f"pass [{names!r}]" if isinstance(names, str) else "pass a list of names"
            raise UsageError("HC555", f"output names must be a list, not {names!r}", remedy=remedy)
        for name in names:
            if not isinstance(name, str) or name not in positions:
                raise UsageError(
                    "HC555", f"unknown output {name!r}", remedy=f"outputs are {listed(positions)}"
                )
        return [positions[name] for name in names]

    def _checked(
        self, feeds: Mapping[str, np.ndarray], kept: Collection[str] = ()
    ) -> tuple[PlanView, dict[str, np.ndarray]]:
        """The plan for their sizes, and the feeds by tensor, each known, complete and of the right type."""
        ports, shapes = self._ports, self._shapes
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
                raise UsageError("HC552", f"input {name!r} is missing", remedy=f"feed {shapes.type_of(port)}")
        fed = {name: shapes.checked(ports[name], feed) for name, feed in feeds.items()}
        sizes = shapes.sizes(fed, ports)
        view = self._plans[shapes.bucket(sizes)]
        return view, view.checked(fed, sizes)


def verify_plans(artifact: Artifact) -> None:
    """Let the verifier check every plan of an artifact. Raises ArtifactError HC306."""
    try:
        for graph, plan in zip(artifact.graphs, artifact.plans, strict=True):
            verify(graph, plan)
    except PlanError as error:
        what = f"its plan is rejected ({error.code}): {error.what}"
        raise ArtifactError("HC306", what, where=error.where, remedy="compile the model again") from error


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


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "hybridc")


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _unlock_sessions() -> None:
    """In a process that was just forked: threads that held locks or did runs of `run_async` are not here."""
    for session in list(_sessions):
        session._lock = threading.Lock()
        if session._reserve is not None:
            session._runs = _one_thread()


os.register_at_fork(after_in_child=_unlock_sessions)
