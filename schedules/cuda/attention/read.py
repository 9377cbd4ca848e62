"""Attention as rules of the GPU read it: its blocks in float32, and which tensors have 16 bits in memory, or
rows of integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import ir, s_tir, tirx

from hybridc.appended_rows import SCALE_BYTES
from hybridc.schedules.cpu.core.attention import AttentionBlocks, read_attention
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.quantized_rows import ROWS, loads_of_rows, scale_of_row, wide_rows
from hybridc.schedules.shapes import shape_of
from hybridc.schedules.storage import WIDE, WideFunction, retyped, widened


@dataclass(frozen=True, slots=True)
class StoredAttention:
    """An attention in the function `wide`, whose tensors are float32, in the place of `original`."""

    original: tirx.PrimFunc
    wide: WideFunction
    blocks: AttentionBlocks
    rows: frozenset[int] = frozenset()
    """Positions of keys and values in rows of integers (`schedules/quantized_rows.py`)."""

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        """Of queries, keys and values in memory."""
        return tuple(
            ROWS if position in self.rows else self.wide.dtypes.get(position, WIDE)
            for position in self.blocks.operands
        )

    def codes(self, load: ir.TensorLoad) -> ir.TensorLoad:
        """The integer in memory of an element of `wide` that is in a row of integers."""
        return tirx.BufferLoad(self._stored_rows[load.source], list(load.indices))

    def scale(self, load: ir.TensorLoad) -> ir.Expr:
        """By which that integer is to be multiplied: float32."""
        return scale_of_row(self._stored_rows[load.source], list(load.indices))

    @property
    def _stored_rows(self) -> Mapping[ir.Var, ir.Var]:
        """Parameters in rows of integers, by those of `wide`."""
        return {self.wide.function.params[i]: self.original.params[i] for i in self.rows}

    def stored(self, kernel: tirx.PrimFunc, staged: Mapping[ir.Var, str]) -> tirx.PrimFunc:
        """A kernel of the parameters of `wide` with those of `original`, and buffers on the way from memory
        that are float32 in it as what they hold is `staged`. It names elements of rows of integers by their
        indices, not by their offsets; neighbours that it loads together are at most four."""
        new = {self.wide.function.params[i]: self.original.params[i] for i in self.wide.dtypes}
        new |= {b: tirx.decl_buffer(b.shape, d, b.name, scope=b.scope()) for b, d in staged.items()}
        root = kernel.body.block
        buffers = [new.get(buffer, buffer) for buffer in root.alloc_buffers]
        body = retyped(root.body, new)
        if self.rows:
            body = loads_of_rows(body, self._stored_rows)
        block = s_tir.SBlock([], [], [], "root", body, alloc_buffers=buffers)
        realize, original = s_tir.SBlockRealize([], True, block), self.original
        return tirx.PrimFunc(original.params, realize, original.ret_type, original.attrs)


def read_stored_attention(function: tirx.PrimFunc) -> StoredAttention | None:
    """The attention of a function, whatever its tensors are stored as; None of any other function, and where
    rows of integers begin at other places than multiples of four bytes, as a GPU loads no scale there."""
    rows = wide_rows(function)
    positions = frozenset[int]() if rows is None else frozenset(rows.positions)
    if any(shape_of(function.params[i])[-1] % SCALE_BYTES for i in positions):
        return None
    floats = function if rows is None else rows.function
    stored = widened(floats)
    wide = WideFunction(floats, {}) if stored is None else stored
    blocks = attempt("reading attention", lambda: read_attention(wide.function))
    return None if blocks is None else StoredAttention(function, wide, blocks, positions)
