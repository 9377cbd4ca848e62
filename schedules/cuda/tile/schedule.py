"""Products in tiles, as a rule schedules them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tvm import tirx

from hybridc.errors import UsageError
from hybridc.gpu_model.architecture import architecture
from hybridc.machine import Processor, load_machine
from hybridc.schedules.cuda.core.anchor import Anchor
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function, reduces_nothing
from hybridc.schedules.cuda.tile.choose import choose
from hybridc.schedules.cuda.tile.kernel import scheduled_product
from hybridc.schedules.cuda.tile.packing import with_depth_first
from hybridc.schedules.cuda.tile.plan import Plan
from hybridc.schedules.cuda.tile.read import read_product
from hybridc.schedules.rule import Request, Scheduled


def tiled(request: Request, anchor: Anchor, rule: str, least: int = 1) -> Scheduled | None:
    """The float32 product of a function in the tiles that are estimated to be fastest; None for others, and
    for those with fewer than `least` rows or columns."""
    if reduces_nothing(request.function):
        return None
    plan = best_plan(request.function, anchor.name, request.own_constants, known_gpu(request.gpu))
    if plan is None or min(plan.product.rows.size, plan.product.columns.size) < least:
        return None
    made = finish_function(scheduled_product(request.function, plan), rule, cuda_target(request.target))
    packings = tuple((weight.position, weight.packing) for weight in plan.product.weights)
    return None if made is None else replace(made, packings=packings)


@lru_cache(maxsize=4)  # of a 3x3 convolution Winograd's rule asks a moment before
def best_plan(
    function: tirx.PrimFunc, anchor: str, constants: frozenset[int], processor: Processor
) -> Plan | None:
    """The plan with the least estimated time of the product whose sum is the block `anchor`; None for what is
    no product. `constants` are positions of parameters that may be packed."""
    product = read_product(function, anchor)
    if product is None:
        return None
    return choose(with_depth_first(product, function.params, constants), processor)


def known_gpu(gpu: Processor | None) -> Processor:
    """The GPU if its times can be estimated, else that of the default profile."""
    try:
        if gpu is not None and gpu.chip is not None:
            architecture(gpu.chip.architecture)
            return gpu
    except UsageError:
        pass
    return load_machine().gpu
