"""Attention of so few queries that reading keys and values takes all the time: decoding, pooling by queries.

Dao et al., "Flash-Decoding for long-context inference" (2023): threads share the keys, and add up what each
of them has at last.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tvm import ir, sym, tirx

from hybridc.appended_rows import SCALE_BYTES
from hybridc.gpu_model.expressions import variables
from hybridc.ir.graph import dtype_bits
from hybridc.machine import Processor
from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cuda.attention.few_queries_cost import estimated_us
from hybridc.schedules.cuda.attention.few_queries_kernel import Plan, Side, few_queries_kernel
from hybridc.schedules.cuda.attention.read import StoredAttention, read_stored_attention
from hybridc.schedules.cuda.core.kernel import integer
from hybridc.schedules.cuda.core.launch import WARP, cuda_target, finish_function
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.tensor_core.read import Element, flattened
from hybridc.schedules.cuda.tensor_core.staging import widest_load
from hybridc.schedules.cuda.tile.schedule import known_gpu
from hybridc.schedules.quantized_rows import ROWS
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

MOST_ROWS = 7
"""Queries above which tiles of queries are faster."""
_VECTOR_BYTES = 16
_LEAST_LANES = 4
"""Of a group that shares a key: they read two sectors at a time."""
_LEAST_ROW_LANES = 8
"""The same of rows of integers, of which they read one sector at a time."""
_QUERY_FLOATS = 64
"""Of queries and sums in the registers of a lane, where a group has enough lanes."""
_MOST_QUERY_FLOATS = 128
"""The same where heads of queries are joined: more leave no registers for keys on their way."""
_LOADED_VECTORS = 8
"""Of keys that a lane reads before it waits for the first."""
_MOST_KEYS = 4
"""Of a turn of a group."""
_WARPS = (4, 8, 16)
"""Of a block; one if the sums of so many rows leave no room for more."""
_PARTS = (1, 2, 4, 8, 16, 32, 64)
_SHARED_FLOATS = 10 << 10
"""Of the sums that warps exchange."""
_NEARLY = 1.02
"""Times that differ by less are alike. Mostly they are those of memory, which blocks that take fewer cycles
come closer to."""


@schedule_rule(family="matmul")
def few_query_attention(request: Request) -> Scheduled | None:
    """Accepts `softmax(steps(query @ key)) @ value` of at most seven queries, of any types in memory.

    Tiling: some lanes of a warp share a key, of which each has vectors of 128 bits; groups of them share the
    keys of a head, each with a maximum and sums of its own, which a block adds up at last. Keys and values in
    rows of integers are loaded four at a time, and stay integers in registers; scales multiply scores and
    weights. Heads of queries that have the same keys are rows of one; blocks share the keys of a head if a
    second launch, which adds up what they have, is estimated to pay.
    """
    attention = read_stored_attention(request.function)
    if attention is None or attention.blocks.rows > MOST_ROWS:
        return None
    plan = best_plan(attention, known_gpu(request.gpu))
    name = few_query_attention.__name__
    function = attempt(name, lambda: few_queries_kernel(attention, plan))
    return None if function is None else finish_function(function, name, cuda_target(request.target))


def best_plan(attention: StoredAttention, processor: Processor) -> Plan:
    """The plan with the least estimated time."""
    times = {plan: estimated_us(attention.blocks, plan, processor) for plan in plans(attention)}
    nearly = _NEARLY * min(us for us, _ in times.values())
    return min((p for p, (us, _) in times.items() if us <= nearly), key=lambda plan: times[plan][1])


def plans(attention: StoredAttention) -> list[Plan]:
    """All that registers and shared memory have room for."""
    found = attention.blocks
    firsts = [_plan_of(attention, shared) for shared in _joined_heads(found)]
    firsts = [plan for plan in firsts if plan.shared == 1 or _query_floats(found, plan) <= _MOST_QUERY_FLOATS]
    plans = [
        replace(plan, warps=warps, parts=parts)
        for plan in firsts
        for warps in _warps(plan.shared * found.rows * found.width)
        for parts in _PARTS
    ]
    # each block of a head has keys
    return [plan for plan in plans if (plan.parts - 1) * plan.stride < found.columns]


def _query_floats(found: AttentionBlocks, plan: Plan) -> int:
    return plan.shared * found.rows * (plan.keys.elements + plan.values.elements)


def _warps(sums: int) -> list[int]:
    """Numbers of warps that can exchange so many sums each."""
    return [warps for warps in _WARPS if warps * sums <= _SHARED_FLOATS] or [1]


def _plan_of(attention: StoredAttention, shared: int) -> Plan:
    """Who has which part of a key, of one warp."""
    found, (_, key, value) = attention.blocks, attention.operand_dtypes
    widths = _vector(found, "scores", found.depth, key), _vector(found, "context", found.width, value)
    most = max(ceil_div(e, w) for e, w in zip((found.depth, found.width), widths, strict=True))
    floats = shared * found.rows * (found.depth + found.width)
    lanes = _LEAST_ROW_LANES if ROWS in (key, value) else _LEAST_LANES
    while lanes < min(WARP, most) and floats > _QUERY_FLOATS * lanes:
        lanes *= 2
    keys = Side("keys", found.depth, widths[0], key, lanes)
    values = Side("values", found.width, widths[1], value, lanes)
    turn = min(_MOST_KEYS, max(1, _LOADED_VECTORS // max(keys.pieces, values.pieces)))
    return Plan(keys, values, turn, 1, shared=shared)


def _joined_heads(found: AttentionBlocks) -> list[int]:
    """How many neighbouring heads of queries can be one, as they have the same keys and values."""
    heads = found.batch[-1] if found.batch else 1
    return [n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or _have_same_keys(found, n))]


def _have_same_keys(found: AttentionBlocks, heads: int) -> bool:
    """Whether so many neighbouring heads of queries read the same keys and values."""
    first, number, place, key = (tirx.Var(name, "int64") for name in ("first", "number", "place", "key"))
    known = sym.Analyzer()
    for variable, size in ((first, math.prod(found.batch) // heads), (number, heads)):
        known.bind(variable, ir.Range.from_min_extent(integer(0), integer(size)))
    batch = found.batch_at(first * integer(heads) + number)
    sides = (
        found.factor("scores", 1, (*batch, integer(0), key), place),
        found.factor("context", 1, (*batch, integer(0), place), key),
    )
    return not any(number in variables(known.simplify(i)) for side in sides for i in side.indices)


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
    # rows of integers begin at multiples of no more than the bytes of a scale
    most = SCALE_BYTES if dtype == ROWS else _VECTOR_BYTES * 8 // dtype_bits(dtype)
    return widest_load(Element((), flattened(load, known)), position, extent, most)
