"""Matrix products of 8-bit numbers with sums in int32, which are exact."""

from __future__ import annotations

from hybridc.schedules.cpu.core.dot_products import dot_of_int8
from hybridc.schedules.cpu.core.nest import adds_128, read_integer_contraction
from hybridc.schedules.cpu.low_precision.amx_matmul import accepts_tile_product, schedule_tile_product
from hybridc.schedules.cpu.low_precision.vnni_matmul import schedule_vnni_product
from hybridc.schedules.cpu.matmul.read import is_constant_matrix, read_product
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="matmul")
def int8_matmul(request: Request) -> Scheduled | None:
    """Accepts products of 8-bit numbers as `passes/precision/quantized.py` writes them, with a constant B.

    Tiling: see `vnni_matmul.py`, and `amx_matmul.py` where there are tiles. Where packed lanes are made,
    signed numbers become unsigned."""
    product, dot = read_product(request.function, read_integer_contraction), dot_of_int8(request.target.isa)
    if product is None or product.multiply_adds == 0 or not is_constant_matrix(request, product):
        return None
    if not product.left.source.same_as(product.contraction.left.source):
        return None
    is_signed = str(product.left.source.dtype) == "int8"
    if is_signed and not adds_128(product.contraction):
        return None  # packed lanes are unsigned
    name = int8_matmul.__name__
    schedule = (
        schedule_tile_product if accepts_tile_product(product, request.target.isa) else schedule_vnni_product
    )
    return schedule(request, product, dot, name, dot.int8_group, dot.int8_groups)
