"""The rule for attention on tensor cores, and how it divides the work."""

from __future__ import annotations

from hybridc.schedules.cuda.attention.cost import ranked_ways
from hybridc.schedules.cuda.attention.read import StoredAttention, read_stored_attention
from hybridc.schedules.cuda.attention.tensor_core_kernel import Way, tensor_core_kernel
from hybridc.schedules.cuda.core.copies import COPIES_SINCE
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.tensor_core.instructions import OLDEST
from hybridc.schedules.cuda.tile.schedule import known_gpu
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.storage import WIDE
from hybridc.targets import architecture_number, oldest

MOST_DEPTH = 256
"""Of queries, and most columns of values: sums of more do not fit the registers of a warp."""


@schedule_rule(family="matmul")
def tensor_core_attention(request: Request) -> Scheduled | None:
    """Accepts `softmax(steps(query @ key)) @ value` whose three operands have the same 16 bits in memory.

    Tiling: a warp has 16 queries, whose fragments, scores and sums stay in its registers; tiles of keys and
    values pass through shared memory. Where there are few queries, warps share them, and each has keys of its
    own. Weights are rounded to 16 bits to be multiplied, as they were where a softmax is a kernel of its own.
    """
    attention = read_stored_attention(request.function)
    dtype = None if attention is None else multiplied_as(attention, request)
    if attention is None or dtype is None:
        return None
    copies = architecture_number(oldest(request.target.cuda_architectures)) >= COPIES_SINCE
    ways = ranked_ways(attention.blocks, known_gpu(request.gpu), copies=copies)
    return next(filter(None, (_scheduled(request, attention, dtype, way) for way in ways)), None)


def _scheduled(request: Request, attention: StoredAttention, dtype: str, way: Way) -> Scheduled | None:
    name = tensor_core_attention.__name__
    function = attempt(name, lambda: tensor_core_kernel(attention, dtype, way))
    return None if function is None else finish_function(function, name, cuda_target(request.target))


def multiplied_as(attention: StoredAttention, request: Request) -> str | None:
    """The type of 16 bits in which tensor cores of the target multiply; None if they do not."""
    (dtype, *others), found = set(attention.operand_dtypes), attention.blocks
    if others or dtype == WIDE or max(found.depth, found.width) > MOST_DEPTH:
        return None
    architecture = architecture_number(oldest(request.target.cuda_architectures))
    return None if architecture < OLDEST[dtype] else dtype


def attention_factors(request: Request) -> frozenset[int]:
    """Positions of the 16-bit floats that attention has tensor cores multiply; empty for other functions."""
    attention = read_stored_attention(request.function)
    if attention is None or multiplied_as(attention, request) is None:
        return frozenset()
    return frozenset(attention.blocks.operands)
