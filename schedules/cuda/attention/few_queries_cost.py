"""Estimated time of attention of few queries: what its launches do, counted in closed form.

The counts follow `hybridc/gpu_model/tir.py`, as those of `cost.py` do, beside shuffles, and integers that
become floats on the pipe of transcendental functions, which it leaves out.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hybridc.gpu_model.fast import Work, estimate_fast
from hybridc.gpu_model.memory import LINE, SECTOR
from hybridc.ir.graph import dtype_bits
from hybridc.machine import Processor
from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cuda.attention.few_queries_kernel import JoinedHeads, Plan, Side
from hybridc.schedules.cuda.core.launch import BLOCK_THREADS, WARP

_FLOAT_BYTES = 4
_OWN_REGISTERS, _REGISTERS_OF_FLOAT, _MOST_REGISTERS = 32, 1.5, 255
_ALL_REGISTERS = 65536
_ACCESS_INSTRUCTIONS = 3
"""Of an access, with the arithmetic of its address."""
_LEAST_CYCLES = 2.0
"""Of an access of a warp, or a shuffle."""
_OF_SCORE = 7
"""Operations of a product that becomes a logit and a weight, with those of the maximum and the total."""

_OF_PART = 6
"""Operations that add one part of a result to it."""


def estimated_us(found: AttentionBlocks, plan: Plan, processor: Processor) -> tuple[float, float]:
    """Microseconds of all launches, without the cost of the first; and those that multiprocessors take, if
    memory were no limit."""
    works = [main_work(found, plan)] + ([sum_work(found, plan)] if plan.parts > 1 else [])
    between = (len(works) - 1) * processor.next_launch_us
    unlimited = (replace(work, memory_bytes=0.0) for work in works)
    us, core_us = (sum(estimate_fast(w, processor).us for w in each) for each in (works, unlimited))
    return us + between, core_us + between


def main_work(found: AttentionBlocks, plan: Plan) -> Work:
    """Of the launch that reads keys and values."""
    heads, keys, values = JoinedHeads(found, plan.shared), plan.keys, plan.values
    rows, threads, warps = heads.rows, plan.warps * WARP, plan.warps
    turns = ceil_div(found.columns, plan.stride * plan.parts)
    vectors = plan.turn * (keys.pieces + values.pieces)
    vector_cycles = plan.turn * sum(side.pieces * _vector_cycles(side) for side in (keys, values))
    in_rows = [side for side in (keys, values) if side.is_rows]
    scales, converted = plan.turn * len(in_rows), plan.turn * sum(side.elements for side in in_rows)
    """Loads of scales, and integers of a lane, in a turn."""
    scores, levels = rows * plan.turn, plan.lanes.bit_length() - 1
    # products, which lanes add up, become logits and weights; sums shrink and grow
    plain = scores * (keys.elements + levels + _OF_SCORE) + rows * values.elements * (plan.turn + 1)
    plain += rows * scales
    special = scores + rows + converted
    looked = ceil_div(turns * plan.stride, threads) + ceil_div(found.columns, threads)
    if found.hiding_mask is None:
        looked = 0
    # what warps have is added up, some results a thread
    added = ceil_div(rows * found.width, threads) * warps
    stored = rows * (values.elements + 2)
    # groups of a warp, one level of distances after the other
    joined = rows * values.elements * (WARP // plan.lanes).bit_length()
    own = rows * (keys.elements + values.elements)
    loaded = sum(plan.turn * s.elements * dtype_bits(s.dtype) // 32 for s in (keys, values))
    registers = _OWN_REGISTERS + _REGISTERS_OF_FLOAT * (own + loaded + scales + scores + 3 * rows)
    most = min(_MOST_REGISTERS, _ALL_REGISTERS // threads // 8 * 8)
    results = rows * found.width * _FLOAT_BYTES
    read = turns * plan.stride * (keys.row_bytes + values.row_bytes)
    shuffles = turns * scores * levels + joined
    accesses = turns * (vectors + scales) + looked + 4 * added + stored
    return Work(
        blocks=heads.count * plan.parts,
        threads=threads,
        registers=min(most, round(registers)),
        shared_bytes=_FLOAT_BYTES * warps * (rows * (found.width + 2) + 2),
        instructions=float(
            warps
            * (turns * (plain + special) + shuffles + _ACCESS_INSTRUCTIONS * accesses + _OF_PART * added)
        ),
        fp32=float(warps * (turns * plain + joined + _OF_PART * added)),
        special=float(warps * (turns * special + rows + added)),
        tensor_multiplies=0.0,
        lsu_cycles=warps
        * (
            turns * (vector_cycles + scales * max(_LEAST_CYCLES, WARP // plan.lanes))
            + _LEAST_CYCLES * (shuffles + looked + 4 * added + stored)
        ),
        l2_sectors=float(read // SECTOR + looked * threads * _FLOAT_BYTES // SECTOR),
        rounds=2.0 + turns,
        memory_bytes=float(_key_bytes(found, plan) + heads.count * plan.parts * results),
    )


def _key_bytes(found: AttentionBlocks, plan: Plan) -> int:
    """Of keys and values in memory, which several blocks may read."""
    sizes = []
    for name, side in (("scores", plan.keys), ("context", plan.values)):
        held = math.prod(int(extent) for extent in found.blocks[name].value.b.b.source.shape)
        read = math.prod(found.batch) * found.columns * side.extent
        sizes.append(min(held, read) * side.row_bytes // side.extent)
    return sum(sizes)


def _vector_cycles(side: Side) -> float:
    """Of the load/store unit for a vector of each lane of a warp: groups read different keys."""
    size = side.width * dtype_bits(side.dtype) // 8
    lines = WARP // side.lanes * max(1, side.lanes * size // LINE)
    return max(_LEAST_CYCLES, size / _FLOAT_BYTES, lines)


def sum_work(found: AttentionBlocks, plan: Plan) -> Work:
    """Of the launch that adds up what blocks have."""
    heads = JoinedHeads(found, plan.shared)
    results = heads.count * heads.rows * found.width
    warps, loads = BLOCK_THREADS // WARP, 4 * plan.parts
    return Work(
        blocks=ceil_div(results, BLOCK_THREADS),
        threads=BLOCK_THREADS,
        registers=_OWN_REGISTERS + 8,
        shared_bytes=0,
        instructions=float(warps * (_ACCESS_INSTRUCTIONS * loads + _OF_PART * plan.parts)),
        fp32=float(warps * _OF_PART * plan.parts),
        special=float(warps * plan.parts),
        tensor_multiplies=0.0,
        lsu_cycles=float(warps * _LEAST_CYCLES * loads),
        l2_sectors=float(plan.parts * BLOCK_THREADS * _FLOAT_BYTES // SECTOR),
        rounds=2.0,
        memory_bytes=float(_FLOAT_BYTES * results * (plan.parts + 1)),
    )
