"""What a multiply-accumulate block looks like to a GPU: its matrix shape, and whether a window slides."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.dlight.gpu.matmul import IterKind, detect_iter_traits
from tvm.s_tir.schedule import ScheduleError


@dataclass(frozen=True, slots=True)
class Anchor:
    """The one reduction of a function that multiplies two buffers, seen as C[batch, i, j] += A[i, k] B[j, k].

    A convolution is the same product: i runs over output positions, j over output channels, k over
    input channels and the window (implicit GEMM). `rows` and `columns` are the extents of i and j; 0
    where the product has no such axis (depthwise and grouped convolution, matrix times vector).
    """

    name: str
    """Name of its block."""
    slides: bool
    """Whether an operand is indexed by a sum of axes, as a convolution's input is."""
    batch: int
    rows: int
    columns: int
    outputs: int
    reduction: int


def find_anchor(function: tirx.PrimFunc) -> Anchor | None:
    """The multiply-accumulate of a function whose other blocks are all element-wise."""
    schedule = s_tir.Schedule(function)
    try:
        blocks = [schedule.get(b) for b in schedule.get_child_blocks(schedule.get_sblock("root"))]
    except ScheduleError:  # a body that is not made of blocks has no root
        return None
    reductions = [b for b in blocks if math.prod(_axes(b, tirx.IterVar.CommReduce)) > 1]
    others_are_elementwise = all(
        len(_axes(b, tirx.IterVar.DataPar)) == len(b.iter_vars) for b in blocks if b not in reductions
    )
    # axes of one step reduce nothing, and do not count
    if len(reductions) != 1 or not others_are_elementwise or not _multiplies(reductions[0]):
        return None
    block = reductions[0]
    extents: dict[IterKind, int] = {}
    traits = detect_iter_traits(block)
    for trait in traits[3] if traits else ():
        extents[trait.kind] = extents.get(trait.kind, 1) * int(trait.extent)
    return Anchor(
        name=block.name_hint,
        slides=any(_is_window(index.min) for read in block.reads for index in read.region),
        batch=extents.get(IterKind.kIter_S, 1),
        rows=extents.get(IterKind.kIter_I, 0),
        columns=extents.get(IterKind.kIter_J, 0),
        outputs=math.prod(_axes(block, tirx.IterVar.DataPar)),
        reduction=math.prod(_axes(block, tirx.IterVar.CommReduce)),
    )


def _axes(block: s_tir.SBlock, kind: int) -> list[int]:
    return [int(i.dom.extent) for i in block.iter_vars if i.iter_type == kind]


def _multiplies(block: s_tir.SBlock) -> bool:
    """Whether the body is `c = c + a * b` with a and b from two buffers (casts allowed)."""
    store = block.body
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Add):
        return False
    return isinstance(store.value.b, tirx.Mul) and len(block.reads) == 2 and len(block.writes) == 1


def _is_window(index: tirx.Expr) -> bool:
    variables: set[tirx.Var] = set()

    def add(var: tirx.Var) -> None:
        variables.add(var)

    tvm_ffi.structural_walk(index, (tirx.Var, add), order="post")
    return len(variables) > 1
