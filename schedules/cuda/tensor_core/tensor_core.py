"""Rules for products of 16-bit floats on tensor cores: matrix products, and convolutions as such."""

from __future__ import annotations

from dataclasses import replace

from hybridc.schedules.cuda.core.launch import cuda_target, finish_function
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.tensor_core.instructions import OLDEST
from hybridc.schedules.cuda.tensor_core.kernel import tensor_core_kernel
from hybridc.schedules.cuda.tensor_core.packing import with_taps_first
from hybridc.schedules.cuda.tensor_core.read import read_matrix_product
from hybridc.schedules.cuda.tensor_core.tile import best_way
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

SMALLEST_SIDE = 8
"""Below this many rows or columns a product is bound by memory, and tiles are mostly padding."""


@schedule_rule(family="matmul")
def tensor_core_matmul(request: Request) -> Scheduled | None:
    """Accepts a product of two matrices of 16-bit floats in memory, batched or not, and an epilogue.

    Tiling: a block has a tile of results and goes through the depth in slices, which its threads load into
    shared memory while tensor cores multiply the slice before.
    """
    return _scheduled(request, "tensor_core_matmul", slides=False)


@schedule_rule(family="conv2d")
def tensor_core_conv(request: Request) -> Scheduled | None:
    """Accepts a convolution of one group whose data and weights are 16-bit floats in memory, and an epilogue.

    Tiling: that of `tensor_core_matmul`: rows are output channels, columns positions of all images, the depth
    input channels and taps (implicit GEMM). Padding is computed while a slice is loaded.
    """
    return _scheduled(request, "tensor_core_conv", slides=True)


def _scheduled(request: Request, rule: str, *, slides: bool) -> Scheduled | None:
    product = read_matrix_product(request.function)
    if product is None or product.slides is not slides:
        return None
    if min(product.row.extent, product.column.extent, product.depth.extent) < SMALLEST_SIDE:
        return None
    target = cuda_target(request.target)
    if int(str(target.arch).removeprefix("sm_").rstrip("af")) < OLDEST[product.dtype]:
        return None
    packed, packings = with_taps_first(product, request.own_constants)
    way = best_way(product.row.extent, product.column.extent, product.depth.extent, product.batch.extent)
    function = attempt(rule, lambda: tensor_core_kernel(request.function, packed, way))
    scheduled = None if function is None else finish_function(function, rule, target)
    return None if scheduled is None else replace(scheduled, packings=packings)
