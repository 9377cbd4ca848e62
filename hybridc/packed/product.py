"""The function of a product with a packed matrix: how it is written, and how it is known again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import s_tir, te, tirx

from hybridc.packed.layout import ROUNDED_ROWS, PackedLayout, dequantized, read_layout

_NAME = "packed_product"


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """Rows [..., K] times a packed matrix [K, columns], in float32."""

    layout: PackedLayout
    columns: int
    rounds_rows: bool = False
    """Whether rows may be rounded to 8 bits."""

    def computed(self, rows: te.Tensor, *weight: te.Tensor) -> te.Tensor:
        """One sum, which rules know by the annotation of its weight."""
        matrix = dequantized(self.layout, self.columns, *weight)
        k = te.reduce_axis((0, int(rows.shape[-1])), name="k")
        return te.compute(
            (*rows.shape[:-1], self.columns),
            lambda *at: te.sum(rows[(*at[:-1], k)] * matrix[k, at[-1]], axis=k),
            name=_NAME,
            attrs={ROUNDED_ROWS: 1} if self.rounds_rows else {},
        )

    def function(self, operands: Sequence[tuple[Sequence[int], str]]) -> tirx.PrimFunc:
        """With rows and the operands of the matrix of these shapes and types, and the result behind them."""
        given = [te.placeholder(shape, dtype, f"x{i}") for i, (shape, dtype) in enumerate(operands)]
        # indices of 64 bits, as those of functions that Relax makes
        made = te.create_prim_func([*given, self.computed(*given)], index_dtype_override="int64")
        return made.with_attr("tirx.noalias", True)


def read_packed_product(function: tirx.PrimFunc) -> PackedProduct | None:
    """What a function was written from, before anything is fused with it; None if it is something else."""
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, blocks.append))
    blocks = [block for block in blocks if block.iter_vars]  # without the root
    layouts = [read_layout(dict(block.annotations)) for block in blocks]
    if len(blocks) != 2 or layouts[0] is None or not str(blocks[1].name_hint).startswith(_NAME):
        return None
    columns = int(blocks[1].writes[0].source.ty.shape[-1])
    return PackedProduct(layouts[0], columns, ROUNDED_ROWS in blocks[1].annotations)
