"""A plan with its lanes, made ready to run in a session's memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

from hybridc.artifact.load import Artifact
from hybridc.ir import Device, Lane
from hybridc.ir.bind import Binding, FaultRows, Operand, View, Weight
from hybridc.runtime.faults import Faults
from hybridc.runtime.memory import GPU_INDEX, Memory, device_errors, step_errors


class LoadedProgram:
    """The chosen plan of an artifact, whose steps work on the arenas of `memory`.

    What it holds is freed by `close`, or when it is collected. Not safe for several threads at once, nor for
    another plan of the same memory while it runs. Raises DeviceError HC407 if the GPU fails.
    """

    def __init__(self, memory: Memory, artifact: Artifact, binding: Binding, threads: int) -> None:
        self._memory, self._artifact = memory, artifact
        with device_errors(), step_errors(artifact):
            self._prepare(binding, threads)

    def _prepare(self, binding: Binding, threads: int) -> None:
        """Give the lanes their steps."""
        memory, artifact = self._memory, self._artifact
        stored, needs_gpu = artifact.stored_plan, artifact.needs_gpu
        self._lanes = memory.helper("open_lanes")(needs_gpu, GPU_INDEX, threads)
        self._close_lanes = weakref.finalize(self, memory.helper("close_lanes"), self._lanes)
        self._run_lanes = memory.helper("run")
        self._faults: Faults | None = None
        if binding.checks:
            self._faults = Faults(memory.helper, binding.checks, pinned=needs_gpu, gpu=GPU_INDEX)
            self._faults.watch(self._lanes)
        self._used_lanes = frozenset(step.lane for step in binding.steps)
        if stored.streamed_weights and memory.staging.slot_count:
            memory.helper("set_slots")(self._lanes, memory.pinned, memory.staging.slot_count)
        read = {w.weight: memory.mapped(w) for w in stored.host_weights}
        self._add_steps(binding, read, {w.weight: memory.staged(w) for w in stored.streamed_weights})

    def _add_steps(
        self, binding: Binding, read: Mapping[Weight, Any], streamed: Mapping[Weight, Any]
    ) -> None:
        """Give the lanes their steps. Arrays that several steps touch are made once."""
        memory = self._memory
        arenas = {Device.GPU: memory.gpu_arena, Device.CPU: memory.host_arena}

        @functools.cache
        def made(operand: View | FaultRows) -> Any:
            if isinstance(operand, FaultRows):
                assert self._faults is not None
                return self._faults.array(operand)
            where = arenas[operand.device], operand.offset_bytes
            return memory.helper("arena_view")(*where, operand.shape, operand.dtype)

        def array(operand: Operand, weights: Mapping[Weight, Any]) -> Any:
            return weights[operand] if isinstance(operand, Weight) else made(operand)

        for step in binding.steps:
            event = -1 if step.event is None else step.event
            if step.function is not None:
                function = memory.library.function(step.function)
                arrays = [array(operand, read) for operand in step.operands]
                memory.helper("add_call")(self._lanes, step.lane.number, step.waits, function, arrays, event)
                continue
            source, target = (array(operand, streamed) for operand in step.operands)
            if isinstance(step.operands[0], Weight):
                memory.helper("add_stream")(self._lanes, step.waits, source, target, event)
            else:
                memory.helper("add_copy")(self._lanes, step.lane.number, step.waits, source, target, event)

    def run(self) -> None:
        """Run the plan's steps; on return every lane is idle.

        Raises DeviceError HC407 if the GPU fails, ArtifactError HC304 if the weights' file was changed,
        UsageError HC560 if a kernel has found a value that its node does not allow: the next run starts
        afresh.
        """
        self._artifact.check_weights()
        try:
            with device_errors(), step_errors(self._artifact):
                fault = self._run_lanes(self._lanes)
            if self._faults is not None and fault >= 0:
                raise self._faults.error(fault)
        except BaseException:
            if self._faults is not None:
                self._faults.clear()
            raise

    def run_traced(self) -> dict[Lane, list[tuple[float, float]]]:
        """Run, and tell when the steps of each lane began and ended, in microseconds since the run's start.

        This run, and all later ones, are a little slower.
        """
        helper = self._memory.helper
        helper("start_tracing")(self._lanes)
        self.run()
        with device_errors():
            times = {lane: list(helper("trace")(self._lanes, lane.number)) for lane in self._used_lanes}
        return {lane: list(zip(marks[::2], marks[1::2], strict=True)) for lane, marks in times.items()}

    def close(self) -> None:
        """Free streams and events."""
        self._close_lanes()
        self._faults = None
