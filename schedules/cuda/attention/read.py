"""Attention as rules of the GPU read it: its blocks in float32, and which tensors have 16 bits in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import ir, s_tir, tirx

from hybridc.schedules.cpu.core.attention import AttentionBlocks, read_attention
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.storage import WIDE, WideFunction, retyped, widened


@dataclass(frozen=True, slots=True)
class StoredAttention:
    """An attention in the function `wide`, whose tensors are float32, in the place of `original`."""

    original: tirx.PrimFunc
    wide: WideFunction
    blocks: AttentionBlocks

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        """Of queries, keys and values in memory."""
        return tuple(self.wide.dtypes.get(position, WIDE) for position in self.blocks.operands)

    def stored(self, kernel: tirx.PrimFunc, staged: Mapping[ir.Var, str]) -> tirx.PrimFunc:
        """A kernel of the parameters of `wide` with those of `original`, and buffers on the way from memory
        that are float32 in it as what they hold is `staged`."""
        new = {self.wide.function.params[i]: self.original.params[i] for i in self.wide.dtypes}
        new |= {b: tirx.decl_buffer(b.shape, d, b.name, scope=b.scope()) for b, d in staged.items()}
        root = kernel.body.block
        buffers = [new.get(buffer, buffer) for buffer in root.alloc_buffers]
        block = s_tir.SBlock([], [], [], "root", retyped(root.body, new), alloc_buffers=buffers)
        realize, original = s_tir.SBlockRealize([], True, block), self.original
        return tirx.PrimFunc(original.params, realize, original.ret_type, original.attrs)


def read_stored_attention(function: tirx.PrimFunc) -> StoredAttention | None:
    """The attention of a function, whatever its tensors are stored as; None of any other function."""
    stored = widened(function)
    wide = WideFunction(function, {}) if stored is None else stored
    blocks = attempt("reading attention", lambda: read_attention(wide.function))
    return None if blocks is None else StoredAttention(function, wide, blocks)
