"""Rules for products on tensor cores: matrix products, and convolutions as such."""

from __future__ import annotations

import math
from dataclasses import replace

from hybridc.gpu_model.architecture import PARTITIONS
from hybridc.gpu_model.chip import chip_of
from hybridc.gpu_model.fast import estimate_fast
from hybridc.gpu_model.tir import work_of_function
from hybridc.machine import Processor
from hybridc.options import FP16
from hybridc.schedules.cuda.core.anchor import find_anchor
from hybridc.schedules.cuda.core.copies import COPIES_SINCE
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function, lowered_for_gpu
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.tensor_core.cost import estimated_us as estimated_us_of_way
from hybridc.schedules.cuda.tensor_core.cost import fastest_way, overlapping_way
from hybridc.schedules.cuda.tensor_core.instructions import INT8, OLDEST, TF32
from hybridc.schedules.cuda.tensor_core.kernel import tensor_core_kernel
from hybridc.schedules.cuda.tensor_core.packing import packed
from hybridc.schedules.cuda.tensor_core.read import MatrixProduct, read_matrix_product
from hybridc.schedules.cuda.tensor_core.tile import PRODUCTS, Way
from hybridc.schedules.cuda.tile.cost import estimated_us as estimated_us_of_tiles
from hybridc.schedules.cuda.tile.schedule import best_plan, known_gpu
from hybridc.schedules.cuda.winograd.plan import estimated_us
from hybridc.schedules.cuda.winograd.winograd import faster_plan
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.shapes import shape_of
from hybridc.targets import Target, architecture_number, oldest

SMALLEST_SIDE = 8
"""Below this many rows or columns a product is bound by memory, and tiles are mostly padding."""
_ROUNDED_BYTES = 4 + 2
"""That rounding an element reads and writes."""
FULL_SIDE = 16
"""Rows of an instruction, which multiplies padding where a product has fewer."""


@schedule_rule(family="matmul")
def tensor_core_matmul(request: Request) -> Scheduled | None:
    """Accepts a product of two matrices, batched or not, and an epilogue: of 16-bit floats in memory, of
    8-bit integers, or of float32 in a function that may multiply tf32.

    Tiling: a block has a tile of results and goes through the depth in slices, which its threads load into
    shared memory while tensor cores multiply the slice before, or copy there asynchronously slices ahead.
    """
    return _scheduled(request, "tensor_core_matmul", slides=False)


@schedule_rule(family="conv2d")
def tensor_core_conv(request: Request) -> Scheduled | None:
    """Accepts a convolution, and an epilogue, of such data and weights as `tensor_core_matmul`; groups, which
    are a batch, of 16-bit floats alone.

    Tiling: that of `tensor_core_matmul`: rows are output channels, columns positions of all images, the depth
    input channels and taps (implicit GEMM). Padding is computed while a slice is loaded.
    """
    return _scheduled(request, "tensor_core_conv", slides=True)


def _scheduled(request: Request, rule: str, *, slides: bool) -> Scheduled | None:
    if request.stays_in_floats:
        return None
    product = _read(request, tf32=request.precision == TF32, rounds=request.precision == FP16)
    if product is None or product.slides is not slides:
        return None
    target = cuda_target(request.target)
    product, packings = packed(product, request.own_constants)
    way = _way(product, request)
    function = attempt(rule, lambda: tensor_core_kernel(request.function, product, way))
    scheduled = None if function is None else finish_function(function, rule, target)
    return None if scheduled is None else replace(scheduled, packings=packings)


def _read(request: Request, *, tf32: bool, rounds: bool = False) -> MatrixProduct | None:
    """The product of a function, if the target's tensor cores can make it and it is large enough."""
    product = attempt(
        "reading a product", lambda: read_matrix_product(request.function, tf32=tf32, rounds=rounds)
    )
    if product is None:
        return None
    if min(product.row.extent, product.column.extent, product.depth.extent) < SMALLEST_SIDE:
        return None
    if product.split and product.row.extent < FULL_SIDE:
        return None  # tiles of float32 waste less
    architecture = architecture_number(oldest(request.target.cuda_architectures))
    return None if architecture < OLDEST[product.dtype] else product


def _way(product: MatrixProduct, request: Request) -> Way:
    gpu = known_gpu(request.gpu)
    if product.dtype == TF32:
        return fastest_way(product, gpu)[0]
    newest = architecture_number(oldest(request.target.cuda_architectures)) >= COPIES_SINCE
    if product.dtype == INT8:
        return fastest_way(product, gpu, copies=newest)[0]
    if newest and PARTITIONS * chip_of(gpu).tensor_multiplies > PRODUCTS:
        return fastest_way(product, gpu, copies=True)[0]
    # of slower tensor cores even few blocks are busy while data is on its way
    return overlapping_way(product, gpu)


def direct_us(request: Request) -> float | None:
    """Estimated time of the product of a function's 16-bit floats by these rules; None if they have none."""
    product = None if request.stays_in_floats else _read(request, tf32=False)
    if product is None:
        return None
    product, _ = packed(product, request.own_constants)
    return estimated_us_of_way(product, _way(product, request), known_gpu(request.gpu))


def tensor_core_factors(request: Request) -> frozenset[int]:
    """Positions of the 16-bit floats that a function has tensor cores multiply; empty if it has none, or has
    them multiply padding, as its time is that of reading the larger factor."""
    product = _read(request, tf32=False)
    if product is None or min(product.row.extent, product.column.extent) < FULL_SIDE:
        return frozenset()
    return frozenset(product.operands)


def read_tf32_product(request: Request) -> MatrixProduct | None:
    """The float32 product of a function that tensor cores could make of tf32."""
    return _read(request, tf32=True)


def tf32_is_faster(product: MatrixProduct, request: Request) -> bool:
    """Whether tensor cores are estimated to take less time than the best rule for float32."""
    gpu, anchor = known_gpu(request.gpu), find_anchor(request.function)
    plan = None if anchor is None else best_plan(request.function, anchor.name, request.own_constants, gpu)
    if plan is None:
        return True
    transformed = faster_plan(request)
    us = estimated_us_of_tiles(plan, gpu) if transformed is None else estimated_us(transformed, gpu)
    return fastest_way(packed(product, request.own_constants)[0], gpu)[1] < us


def multiplied_factors(request: Request) -> frozenset[int]:
    """Positions of the 16-bit floats that a function can have tensor cores multiply, padding among them."""
    product = _read(request, tf32=False)
    return frozenset() if product is None else frozenset(product.operands)


def tensor_cores_pay(request: Request, rounded: frozenset[int]) -> bool:
    """Whether tensor cores are estimated to make the product of a function's 16-bit floats, of which those at
    these positions are rounded by launches of their own before, in less time than tiles of float32."""
    product, gpu = _read(request, tf32=False), known_gpu(request.gpu)
    # where nothing is known of the GPU, that of the default profile may have no tensor cores
    if product is None or not chip_of(gpu).tensor_multiplies:
        return True
    anchor = find_anchor(product.wide.function)
    plan = None if anchor is None else best_plan(product.wide.function, anchor.name, frozenset(), gpu)
    if plan is None:
        return True
    elements = [math.prod(shape_of(request.function.params[i])) for i in rounded]
    us = sum(gpu.launch_us + _ROUNDED_BYTES * count / (1e3 * gpu.bandwidth_gb_s) for count in elements)
    float_us = estimated_us_of_tiles(plan, gpu)
    if us + estimated_us_of_way(product, _way(product, request), gpu) >= float_us:
        return False
    # arithmetic of addresses, which those counts leave out, is most of it where a window slides over columns
    rule = tensor_core_conv if product.slides else tensor_core_matmul
    made = rule(request)
    return made is not None and us + _counted_us(made, request.target, gpu) < float_us


def _counted_us(scheduled: Scheduled, target: Target, gpu: Processor) -> float:
    """Estimated time of what a scheduled function does; infinite where there is none."""
    lowered = lowered_for_gpu(scheduled.function, cuda_target(target))
    works = attempt("the model of GPU times", lambda: work_of_function(lowered))
    if not works:
        return math.inf
    return (len(works) - 1) * gpu.next_launch_us + sum(estimate_fast(work, gpu).us for work in works)
