"""Functions of attention that compute each head by itself, and how they are written for some of the heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import s_tir, te, tirx

from hybridc.appended_rows import APPENDED_ROWS, appended_rows, is_appended_rows, rounds_rows
from hybridc.passes.canonicalize.rotary import ROTARY, rotary
from hybridc.passes.program.program import content_number
from hybridc.schedules.shapes import index_shape

HEADS = 1
"""The axis of heads, of operands and results."""


@dataclass(frozen=True, slots=True)
class HeadFunction:
    """Rows that take their places in a cache, or rotary position embedding, of any number of heads."""

    name: str
    function: tirx.PrimFunc

    @property
    def appends(self) -> bool:
        """Whether its first operand is a cache, in which rows take their places."""
        return self.name != ROTARY

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tirx.PrimFunc:
        """The same with operands of these shapes, by a name that tells them."""
        if self.appends:
            types = [str(parameter.dtype) for parameter in self.function.params]
            given = [te.placeholder(index_shape(s), t) for s, t in zip(shapes, types, strict=False)]
            made = te.create_prim_func([*given, appended_rows(*given)], index_dtype_override="int64")
        else:
            made = rotary(*shapes)
        for key in ("op_pattern", "tirx.noalias"):
            if key in self.function.attrs:
                made = made.with_attr(key, self.function.attrs[key])
        types = [str(parameter.dtype) for parameter in made.params]
        name = f"{self.name}_{content_number(repr((tuple(shapes), types)).encode())}"
        return made.with_attr("global_symbol", name)


def read_head_function(function: tirx.PrimFunc) -> HeadFunction | None:
    """What a function computes, before anything is fused with it; None if it is something else."""
    is_plain = is_appended_rows(function) and not rounds_rows(function)
    if is_plain and str(function.params[0].dtype) == str(function.params[-1].dtype):
        return HeadFunction(APPENDED_ROWS, function)
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, blocks.append))
    names = [str(block.name_hint) for block in blocks if block.iter_vars]
    return HeadFunction(ROTARY, function) if names == [ROTARY] else None
