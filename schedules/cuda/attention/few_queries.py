"""Attention of so few queries that reading keys and values takes all the time: decoding, pooling by queries.

Dao et al., "Flash-Decoding for long-context inference" (2023): threads share the keys, and add up what each
of them has at last.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tvm import ir, sym, tirx

from hybridc.gpu_model.chip import L2_BYTES_PER_CYCLE, bandwidth_us, chip_of
from hybridc.ir.graph import dtype_bits
from hybridc.machine import Processor
from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cuda.attention.few_queries_kernel import Plan, Side, few_queries_kernel
from hybridc.schedules.cuda.attention.read import StoredAttention, read_stored_attention
from hybridc.schedules.cuda.core.kernel import integer
from hybridc.schedules.cuda.core.launch import WARP, cuda_target, finish_function
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.tensor_core.read import Element, flattened
from hybridc.schedules.cuda.tensor_core.staging import widest_load
from hybridc.schedules.cuda.tile.schedule import known_gpu
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

MOST_ROWS = 7
"""Queries above which tiles of queries are faster."""
_VECTOR_BYTES = 16
_LEAST_LANES = 4
"""Of a group that shares a key: they read two sectors at a time."""
_QUERY_FLOATS = 64
"""Of queries and sums in the registers of a lane, where a group has enough lanes."""
_LOADED_VECTORS = 8
"""Of keys that a lane reads before it waits for the first."""
_MOST_KEYS = 4
"""Of a turn of a group."""
_MOST_WARPS = 16
_SHARED_FLOATS = 10 << 10
"""Of the sums that warps exchange."""
_SECOND_LAUNCH_US = 1.5
"""Of few threads that read what blocks have, beside the cost of the launch."""


@schedule_rule(family="matmul")
def few_query_attention(request: Request) -> Scheduled | None:
    """Accepts `softmax(steps(query @ key)) @ value` of at most seven queries, of any types in memory.

    Tiling: some lanes of a warp share a key, of which each has vectors of 128 bits; groups of them share the
    keys of a head, each with a maximum and sums of its own, which a block adds up at last.
    """
    attention = read_stored_attention(request.function)
    if attention is None or attention.blocks.rows > MOST_ROWS:
        return None
    plan = _plan(attention, known_gpu(request.gpu))
    name = few_query_attention.__name__
    function = attempt(name, lambda: few_queries_kernel(attention, plan))
    return None if function is None else finish_function(function, name, cuda_target(request.target))


def _plan(attention: StoredAttention, processor: Processor) -> Plan:
    found = attention.blocks
    _, key, value = attention.operand_dtypes
    widths = _vector(found, "scores", found.depth, key), _vector(found, "context", found.width, value)
    most = max(ceil_div(e, w) for e, w in zip((found.depth, found.width), widths, strict=True))
    lanes = _LEAST_LANES
    while lanes < min(WARP, most) and found.rows * (found.depth + found.width) > _QUERY_FLOATS * lanes:
        lanes *= 2
    keys = Side("keys", found.depth, widths[0], key, lanes)
    values = Side("values", found.width, widths[1], value, lanes)
    turn = min(_MOST_KEYS, max(1, _LOADED_VECTORS // max(keys.pieces, values.pieces)))
    plan = Plan(keys, values, turn, 1)
    while (
        plan.warps < _MOST_WARPS
        and plan.stride < found.columns
        and 2 * plan.warps * found.rows * found.width <= _SHARED_FLOATS
    ):
        plan = replace(plan, warps=2 * plan.warps)
    return _in_parts(found, plan, processor)


def _in_parts(found: AttentionBlocks, plan: Plan, processor: Processor) -> Plan:
    """The plan whose blocks share a head where few heads would leave most multiprocessors without one, and
    what a block reads takes longer than another launch."""
    chip, heads = chip_of(processor), math.prod(found.batch)
    bits = found.depth * dtype_bits(plan.keys.dtype) + found.width * dtype_bits(plan.values.dtype)
    head_bytes = found.columns * bits / 8

    def us(parts: int) -> float:
        blocks = ceil_div(heads * parts, chip.multiprocessors)
        read = blocks * head_bytes / parts / (L2_BYTES_PER_CYCLE * chip.clock_ghz * 1e3)
        more = processor.launch_us + _SECOND_LAUNCH_US if parts > 1 else 0.0
        return max(read, bandwidth_us(heads * head_bytes, processor)) + more

    turns = ceil_div(found.columns, plan.stride)
    parts = [n for n in (1, 2, 4, 8, 16, 32) if n <= turns]
    return replace(plan, parts=min(parts, key=us))


def _vector(found: AttentionBlocks, block: str, extent: int, dtype: str) -> int:
    """Elements of the right factor of a product that lie side by side in memory, as they are loaded."""
    position, key = tirx.Var("position", "int64"), tirx.Var("key", "int64")
    batch = [tirx.Var(f"batch_{i}", "int64") for i in range(len(found.batch))]
    known = sym.Analyzer()
    for variable, size in ((position, extent), (key, found.columns), *zip(batch, found.batch, strict=True)):
        known.bind(variable, ir.Range.from_min_extent(integer(0), integer(size)))
    if block == "scores":
        load = found.factor(block, 1, (*batch, integer(0), key), position)
    else:
        load = found.factor(block, 1, (*batch, integer(0), position), key)
    most = _VECTOR_BYTES * 8 // dtype_bits(dtype)
    return widest_load(Element((), flattened(load, known)), position, extent, most)
