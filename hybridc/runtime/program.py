"""A plan with its lanes, made ready to run in a session's memory."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import numpy as np
import tvm_ffi

from hybridc.artifact.load import Artifact
from hybridc.artifact.manifest import StoredPlan
from hybridc.ir import Device, Graph, Lane, Run, Step
from hybridc.ir.bind import Binding, BoundStep, FaultRows, Operand, View, Weight
from hybridc.runtime.collectives import Collectives
from hybridc.runtime.faults import Faults
from hybridc.runtime.memory import GPU_INDEX, Memory, device_errors, step_errors

_LANES = {
    Lane.GPU.number: "kernels on the GPU",
    Lane.CPU.number: "kernels on the CPU",
    Lane.H2D.number: "copies to the GPU",
    Lane.D2H.number: "copies to the host",
    Lane.NET.number: "sums over the ranks",
}


def described_step(graph: Graph, step: Step) -> str:
    """A step as a user knows it: a kernel with its ONNX nodes, or the tensor that is copied."""
    if isinstance(step, Run):
        nodes = ", ".join(graph.kernel[step.kernel].origins)
        return (
            f"kernel {step.kernel!r}"
            + (f" (ONNX nodes: {nodes})" if nodes else "")
            + f" on the {step.device.upper()}"
        )
    return f"the copy of tensor {step.tensor!r} to the {step.target.upper()}"


class _Arrays:
    """What steps are called with. Arrays that several steps touch are made once.

    No closure: a traceback would hold its arrays, and so the arenas, whatever becomes of the locals.
    """

    def __init__(self, memory: Memory, stored: StoredPlan, faults: Faults | None) -> None:
        self._helper, self._faults = memory.helper, faults
        self._arenas = {Device.GPU: memory.gpu_arena, Device.CPU: memory.host_arena}
        self._host_weights = {w.weight: memory.mapped(w) for w in stored.host_weights}
        self._streamed = {w.weight: memory.staged(w) for w in stored.streamed_weights}
        self._made: dict[View | FaultRows, Any] = {}

    def read(self, operand: Operand) -> Any:
        """Of a kernel."""
        return self._host_weights[operand] if isinstance(operand, Weight) else self._array(operand)

    def copied(self, operand: Operand) -> Any:
        """Of a copy."""
        return self._streamed[operand] if isinstance(operand, Weight) else self._array(operand)

    def _array(self, operand: View | FaultRows) -> Any:
        if operand not in self._made:
            self._made[operand] = self._make(operand)
        return self._made[operand]

    def _make(self, operand: View | FaultRows) -> Any:
        if isinstance(operand, FaultRows):
            assert self._faults is not None
            return self._faults.array(operand)
        where = self._arenas[operand.device], operand.offset_bytes
        return self._helper("arena_view")(*where, operand.shape, operand.dtype)


def _collective(collectives: Collectives, function: str, *tensors: Any) -> None:
    """What the network's lane calls."""
    collectives.make(function, [np.from_dlpack(tensor) for tensor in tensors])


class LoadedProgram:
    """The chosen plan of an artifact, whose steps work on the arenas of `memory`.

    What it holds is freed by `close`, or when it is collected. Not safe for several threads at once, nor for
    another plan of the same memory while it runs. Raises DeviceError HC407 if the GPU fails.
    """

    def __init__(
        self,
        memory: Memory,
        artifact: Artifact,
        binding: Binding,
        threads: int,
        collectives: Collectives | None = None,
        beside: LoadedProgram | None = None,
    ) -> None:
        """With as many threads for the CPU's kernels, those of the plan `beside` it if there is one."""
        self._memory, self._artifact, self._collectives = memory, artifact, collectives
        self._faults: Faults | None = None
        with device_errors("the streams of a plan's lanes"):
            self._lanes = memory.helper("open_lanes")(artifact.needs_gpu, GPU_INDEX, threads)
        self._close_lanes = weakref.finalize(self, memory.helper("close_lanes"), self._lanes)
        try:
            if beside is not None:
                memory.helper("share_workers")(self._lanes, beside._lanes)
            with device_errors(), step_errors(artifact):
                self._prepare(binding)
        except BaseException:
            self.close()
            raise

    def _prepare(self, binding: Binding) -> None:
        """Give the lanes their steps."""
        memory, artifact = self._memory, self._artifact
        stored, needs_gpu = artifact.stored_plan, artifact.needs_gpu
        self._run_lanes = memory.helper("run")
        if binding.checks:
            with device_errors("the pinned array of what kernels find wrong with values"):
                self._faults = Faults(memory.helper, binding.checks, pinned=needs_gpu, gpu=GPU_INDEX)
            self._faults.watch(self._lanes)
        self._used_lanes = frozenset(step.lane for step in binding.steps)
        if stored.streamed_weights and memory.staging.slot_count:
            with device_errors("the slots of streamed weights"):
                memory.helper("set_slots")(self._lanes, memory.pinned, memory.staging.slot_count)
        arrays = _Arrays(memory, stored, self._faults)
        for position, step in enumerate(binding.steps):
            with device_errors(functools.partial(self._described, position)):
                self._add(step, arrays)

    def _add(self, step: BoundStep, arrays: _Arrays) -> None:
        """Give its lane a step."""
        helper, event = self._memory.helper, -1 if step.event is None else step.event
        if step.function is not None:
            function = self._function(step)
            given = [arrays.read(operand) for operand in step.operands]
            helper("add_call")(self._lanes, step.lane.number, step.waits, function, given, event)
        else:
            source, target = (arrays.copied(operand) for operand in step.operands)
            if isinstance(step.operands[0], Weight):
                helper("add_stream")(self._lanes, step.waits, source, target, event)
            else:
                helper("add_copy")(self._lanes, step.lane.number, step.waits, source, target, event)
        if step.guards:
            conditions = [arrays.read(condition) for condition, _ in step.guards]
            values = [int(value) for _, value in step.guards]
            helper("guard_step")(self._lanes, step.lane.number, conditions, values)

    def _function(self, step: BoundStep) -> Any:
        assert step.function is not None
        if step.lane is not Lane.NET or self._collectives is None:
            return self._memory.library.function(step.function)
        return tvm_ffi.convert(functools.partial(_collective, self._collectives, step.function))

    def run(self) -> None:
        """Run the plan's steps; on return every lane is idle.

        Raises DeviceError HC407 if the GPU fails, ArtifactError HC304 if the weights' file was changed,
        UsageError HC560 if a kernel has found a value that its node does not allow: the next run starts
        afresh.
        """
        self._artifact.check_weights()
        try:
            try:
                fault = self._run_lanes(self._lanes)
            except (
                Exception
            ):  # what tells the errors is only made for one: it takes as long as a small network
                with device_errors(self._failed_place), step_errors(self._artifact):
                    raise
            if self._faults is not None and fault >= 0:
                raise self._faults.error(fault)
        except BaseException:
            if self._faults is not None:
                self._faults.clear()
            failure = None if self._collectives is None else self._collectives.take_failure()
            if failure is not None:
                raise failure from None
            raise

    def run_traced(self) -> dict[Lane, list[tuple[float, float]]]:
        """Run, and tell when the steps of each lane began and ended, in microseconds since the run's start.

        This run, and all later ones, are a little slower.
        """
        helper = self._memory.helper
        helper("start_tracing")(self._lanes)
        self.run()
        with device_errors("the times of steps"):
            times = {lane: list(helper("trace")(self._lanes, lane.number)) for lane in self._used_lanes}
        return {lane: list(zip(marks[::2], marks[1::2], strict=True)) for lane, marks in times.items()}

    def _failed_place(self) -> str:
        """What the last run failed at: a step, or a lane whose steps were all issued."""
        number, position = self._memory.helper("failed_step")(self._lanes)
        steps = [i for i, step in enumerate(self._artifact.plan.steps) if step.lane.number == number]
        if position >= 0:
            return self._described(steps[position])
        return f"the end of the {_LANES[number]}" if number in _LANES else "the start of the run"

    def _described(self, position: int) -> str:
        return described_step(self._artifact.graph, self._artifact.plan.steps[position])

    def close(self) -> None:
        """Free streams and events."""
        self._close_lanes()
        self._faults = None
