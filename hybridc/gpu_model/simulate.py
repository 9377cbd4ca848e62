"""Time of a traced kernel on one multiprocessor: the simulation in native/simulate.cpp, called from
Python."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridc.errors import DeviceError
from hybridc.gpu_model import memory
from hybridc.gpu_model.trace import Trace
from hybridc.gpu_model.units import Cost, Unit
from hybridc.native import build_library

_SOURCE = Path(__file__).parent / "native" / "simulate.cpp"
_STEADY = (0.2, 0.95)
"""Part of the turns that show a loop's pace: the first ones fill caches, the last ones leave units idle."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What of a multiprocessor's speed depends on GPU and launch."""

    fp32_pipes: int
    l1_bytes: int
    miss_cycles: float
    """From a miss of L1 until the sector is there."""
    l2_bytes_per_cycle: float
    """What L2 gives one multiprocessor."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Result of a simulation."""

    cycles: float
    """Until the last warp ends, with all turns of the loop that was cut."""
    busy: dict[Unit, float]
    """Share of the cycles that the units are busy."""
    l2_busy: float
    """The same for what L2 gives this multiprocessor."""


_LATENCIES = {"shared_latency": 23.0, "l1_latency": 33.0}
"""Cycles; sjfeng1999/gpu-arch-microbenchmark measures 23 and 32 on an RTX 2070, Jia et al. (arXiv
1903.07486) the like on a T4."""
_QUEUE_CYCLES = 32.0
"""Of work that the load/store unit takes in before warps have to wait with theirs. Customary."""
_BRANCH_CYCLES = 8.0
"""Lost by a jump that is taken. Customary."""


class _Instruction(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            *("unit", "cycles", "latency", "stall", "write_scoreboard", "read_scoreboard", "waits_for"),
            *("bank_cycles", "flags", "groups"),
        )
    )


class _Trace(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("warps", "warps_of_block", "steps", "loop_end", "kept_turns")),
        *(
            (name, ctypes.c_void_p)
            for name in ("code", "step_instruction", "step_warps", "step_access", "lsu_cycles")
        ),
        *((name, ctypes.c_void_p) for name in ("sector_starts", "sectors")),
    )


class _Multiprocessor(ctypes.Structure):
    _fields_ = (
        ("fp32_pipes", ctypes.c_int32),
        ("l1_lines", ctypes.c_int32),
        *(
            (name, ctypes.c_double)
            for name in (
                *("shared_latency", "l1_latency", "miss_latency", "l2_cycles_per_sector"),
                *("queue_cycles", "branch_cycles"),
            )
        ),
    )


class _Outcome(ctypes.Structure):
    _fields_ = (
        ("cycles", ctypes.c_double),
        ("busy", ctypes.c_double * len(Unit)),
        ("l2_sectors", ctypes.c_double),
    )


def simulate(trace: Trace, costs: tuple[Cost, ...], speeds: Speeds) -> Pace:
    """Run a trace's warps on one multiprocessor. Raises DeviceError HC403 without g++."""
    library = build_library(_SOURCE, "gpu_model")
    if library is None:
        remedy = "install g++ (Debian: apt-get install g++)"
        raise DeviceError("HC403", "the model of GPU times needs g++", remedy=remedy)
    data, keep = _trace_data(trace, costs)
    machine = _Multiprocessor(
        speeds.fp32_pipes,
        speeds.l1_bytes // memory.LINE,
        *_LATENCIES.values(),
        speeds.miss_cycles,
        memory.SECTOR / speeds.l2_bytes_per_cycle,
        _QUEUE_CYCLES,
        _BRANCH_CYCLES,
    )
    outcome, marks = _Outcome(), np.zeros(trace.warps * trace.loop.kept + 1)
    run = library.gpu_model_simulate
    count = run(*map(ctypes.byref, (data, machine, outcome)), ctypes.c_void_p(marks.ctypes.data))
    del keep
    turns = trace.loop.turns - trace.loop.kept
    turn_cycles = _turn_cycles(marks[:count], trace.warps)
    return Pace(
        outcome.cycles + turns * turn_cycles,
        {unit: outcome.busy[unit] / max(outcome.cycles, 1) for unit in Unit if unit is not Unit.NONE},
        outcome.l2_sectors * machine.l2_cycles_per_sector / max(outcome.cycles, 1),
    )


def _turn_cycles(marks: Any, warps: int) -> float:
    """Cycles of a turn of all warps, from the times at which each warp ended one: the slope of a straight
    line."""
    first, last = (int(share * len(marks)) for share in _STEADY)
    if last - first < 2:
        return 0.0
    return float(np.polyfit(np.arange(first, last), np.sort(marks)[first:last], 1)[0]) * warps


def _trace_data(trace: Trace, costs: tuple[Cost, ...]) -> tuple[_Trace, list[Any]]:
    """The trace as native/multiprocessor.h has it, and the arrays that it points to."""
    code = (_Instruction * len(trace.code))(
        *(
            _Instruction(
                cost.unit,
                cost.cycles,
                cost.latency,
                instruction.stall,
                instruction.write_scoreboard,
                instruction.read_scoreboard,
                instruction.waits_for,
                cost.bank_cycles,
                cost.flags,
                cost.groups,
            )
            for instruction, cost in zip(trace.code, costs, strict=True)
        )
    )
    bits = 1 << np.arange(trace.warps, dtype=np.uint64)
    accesses = [step.access for step in trace.steps if step.access is not None]
    rows = np.cumsum([step.access is not None for step in trace.steps]) - 1
    counts = [
        np.zeros(trace.warps, np.int64) if a.sectors is None else memory.sector_counts(a.sectors)
        for a in accesses
    ]
    sectors = [a.sectors[a.sectors != memory.NONE] for a in accesses if a.sectors is not None]
    arrays: list[Any] = [
        np.array([step.instruction.index for step in trace.steps], np.int32),
        np.array([bits[step.warps].sum() for step in trace.steps], np.uint64),
        np.where([step.access is not None for step in trace.steps], rows, -1).astype(np.int32),
        np.array([a.lsu_cycles for a in accesses], np.float64).reshape(-1),
        np.concatenate([[0], *counts]).cumsum().astype(np.int64),
        np.concatenate([np.zeros(0, np.int64), *sectors]).astype(np.int64),
    ]
    head = (trace.warps, trace.warps_of_block, len(trace.steps), trace.loop.end, trace.loop.kept)
    pointers = [ctypes.addressof(code), *(array.ctypes.data for array in arrays)]
    return _Trace(*head, *pointers), [code, *arrays]
