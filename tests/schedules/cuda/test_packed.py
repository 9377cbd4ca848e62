"""Packed weights become numbers in a GPU's registers: never a float32 matrix in its memory."""

from __future__ import annotations

import pytest
from tvm import te, tirx

from hybridc.ir import Device
from hybridc.packed.layout import PackedLayout, dequantized
from hybridc.schedules.rule import Request
from hybridc.schedules.select import schedule
from hybridc.targets import parse_target


def product(rows: tuple[int, ...], columns: int, layout: PackedLayout) -> tirx.PrimFunc:
    """Of depth 256 in blocks of 64, relu(a @ w)."""
    width, depth = 64 if columns % 64 == 0 else 16, 256
    panels = -(-columns // width)
    a = te.placeholder((*rows, depth), "float32", "a")
    kept = "int8" if layout.bits == 8 and not layout.exponent else "uint8"
    codes = te.placeholder((panels, depth // layout.codes_in_byte, width), kept, "codes")
    scales = te.placeholder((panels, depth // 64, width), "float16", "scales")
    weight, k = dequantized(layout, columns, codes, scales), te.reduce_axis((0, depth), "k")
    shape = (*rows, columns)
    sums = te.compute(shape, lambda *at: te.sum(a[(*at[:-1], k)] * weight[k, at[-1]], axis=k), name="sums")
    result = te.compute(shape, lambda *at: tirx.Max(sums[at], tirx.const(0, "float32")), name="relu")
    return te.create_prim_func([a, codes, scales, result])


LAYOUTS = {
    "uint4": PackedLayout(4, 32, 8),
    "int8": PackedLayout(8, 32, 0),
    "float8_e4m3fn": PackedLayout(8, 32, 0, 4),
    "float4_e2m1fn": PackedLayout(4, 32, 0, 2),
}


@pytest.mark.parametrize("codes", LAYOUTS)
@pytest.mark.parametrize(
    ("rows", "columns", "rule"),
    [((1,), 128, "few_rows"), ((2, 4), 70, "packed_gemv"), ((3, 3), 128, "matmul"), ((70,), 70, "matmul")],
)
def test_rules_and_memory(rows: tuple[int, ...], columns: int, rule: str, codes: str) -> None:
    request = Request(
        product(rows, columns, LAYOUTS[codes]), frozenset({1, 2}), parse_target("cuda:sm_80+avx2")
    )
    scheduled = schedule(request, Device.GPU)
    assert scheduled is not None and scheduled.rule == rule
    assert not scheduled.workspace_bytes
