"""Products in tiles, as a rule schedules them."""

from __future__ import annotations

from hybridc.errors import UsageError
from hybridc.gpu_model.architecture import architecture
from hybridc.machine import Processor, load_machine
from hybridc.schedules.cuda.core.anchor import Anchor
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function, reduces_nothing
from hybridc.schedules.cuda.tile.choose import choose
from hybridc.schedules.cuda.tile.kernel import scheduled_product
from hybridc.schedules.cuda.tile.read import read_product
from hybridc.schedules.rule import Request, Scheduled


def tiled(request: Request, anchor: Anchor, rule: str) -> Scheduled | None:
    """The float32 product of a function in the tiles that are estimated to be fastest; None for others."""
    if reduces_nothing(request.function):
        return None
    product = read_product(request.function, anchor.name)
    if product is None:
        return None
    plan = choose(product, known_gpu(request.gpu))
    made = scheduled_product(request.function, plan)
    return finish_function(made, rule, cuda_target(request.target))


def known_gpu(gpu: Processor | None) -> Processor:
    """The GPU if its times can be estimated, else that of the default profile."""
    try:
        if gpu is not None and gpu.chip is not None:
            architecture(gpu.chip.architecture)
            return gpu
    except UsageError:
        pass
    return load_machine().gpu
