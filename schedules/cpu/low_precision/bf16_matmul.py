"""Matrix products whose factors are rounded to bf16, with sums in float32; errors as in `bf16_conv2d.py`."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx

from hybridc.options import BF16
from hybridc.schedules.cpu.core.dot_products import bf16_pair, bf16_pairs_of_neighbours, dot_of_bf16
from hybridc.schedules.cpu.low_precision.amx_matmul import accepts_tile_product, schedule_tile_product
from hybridc.schedules.cpu.low_precision.bf16_storage import without_widening
from hybridc.schedules.cpu.low_precision.vnni_matmul import schedule_vnni_product
from hybridc.schedules.cpu.matmul.read import Product, read_product
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="matmul")
def bf16_matmul(request: Request) -> Scheduled | None:
    """Accepts what `matmul` does, with a B that is a parameter of two axes, if bf16 is asked for. Tiling: see
    `vnni_matmul.py`, and `amx_matmul.py` where there are tiles.
    """
    product, dot = read_bf16_product(request), dot_of_bf16(request.target.isa)
    if product is None or dot is None:
        return None
    name = bf16_matmul.__name__
    schedule = (
        schedule_tile_product if accepts_tile_product(product, request.target.isa) else schedule_vnni_product
    )
    return schedule(request, product, dot, name, lambda pair: bf16_pair(*pair), bf16_pairs_of_neighbours)


def read_bf16_product(request: Request) -> Product | None:
    """None if there is no such kernel, or none is asked for."""
    if request.precision != BF16 or not request.target.isa.has_bf16:
        return None
    widened = without_widening(request.function)
    product = read_product(widened.function)
    if product is None or product.multiply_adds == 0 or not _is_matrix(product):
        return None
    data = tirx.BufferLoad(widened.kept(product.left.source), product.left.indices)
    return replace(product, left=data)


def _is_matrix(product: Product) -> bool:
    """Whether B is a parameter and has no axes but K and N."""
    source = product.right.source
    return product.contraction.nest.parameter(source) is not None and len(source.shape) == 2
