"""Counts for the closed form, read off machine code."""

from __future__ import annotations

import numpy as np

from hybridc.gpu_model import memory
from hybridc.gpu_model.architecture import Architecture
from hybridc.gpu_model.fast import Work
from hybridc.gpu_model.kernel import Call
from hybridc.gpu_model.trace import Trace, main_loop, trace_blocks
from hybridc.gpu_model.units import Unit, float_weight, is_integer, tensor_products, unit_of

_GLOBAL = (Unit.GLOBAL, Unit.COPY)


def work_of_call(call: Call, model: Architecture) -> Work:
    """What a launch does, from a trace of one block in the middle of the grid."""
    launch, code = call.launch, call.kernel.code
    loop = main_loop(code, launch)
    trace = trace_blocks(code, launch, [launch.block_index(launch.blocks // 2)], loop, model)
    names = ("instructions", "fp32", "special", "tensor_multiplies", "integer_multiplies", "lsu_cycles")
    totals = dict.fromkeys(names, 0.0)
    for number, step in enumerate(trace.steps):
        warps, unit = trace.weight(number) * float(step.warps.sum()), unit_of(step.instruction)
        totals["instructions"] += warps
        totals["fp32"] += warps * (unit is Unit.FP32)
        totals["special"] += warps * (unit is Unit.SFU)
        if unit is Unit.TENSOR:
            name = "integer_multiplies" if is_integer(step.instruction) else "tensor_multiplies"
            weight = float_weight(step.instruction)
            totals[name] += warps * weight * tensor_products(step.instruction)
        if step.access is not None:
            totals["lsu_cycles"] += trace.weight(number) * float(step.access.lsu_cycles.sum())
    return Work(
        blocks=launch.blocks,
        threads=launch.threads,
        registers=call.kernel.resources.registers,
        shared_bytes=call.shared_bytes,
        l2_sectors=_sectors(trace),
        rounds=_rounds(trace),
        memory_bytes=float(call.buffer_bytes),
        **totals,
    )


def _sectors(trace: Trace) -> float:
    """Distinct ones of the block: L1 has what it reads again."""
    before, within = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for number, step in enumerate(trace.steps):
        if step.access is not None and step.access.sectors is not None:
            (within if trace.weight(number) > 1 else before).append(np.unique(step.access.sectors))
    once, often = (np.unique(np.concatenate(parts)) for parts in (before, within))
    return float((once != memory.NONE).sum() + trace.loop.repeats * (often != memory.NONE).sum())


def _rounds(trace: Trace) -> float:
    """Turns of the main loop in which global memory is read, and one for what is outside of it."""
    loads = [
        trace.weight(number) > 1
        for number, step in enumerate(trace.steps)
        if unit_of(step.instruction) in _GLOBAL and step.instruction.opcode.startswith("LD")
    ]
    return 1.0 + (trace.loop.turns if any(loads) else 0.0)
