"""Products with packed weights, of any number of rows."""

from __future__ import annotations

from hybridc.schedules.cpu.core.micro_kernel import function_of
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.packed.bf16_rows import bf16_dot
from hybridc.schedules.cpu.packed.few_rows import FEW_ROWS, few_rows
from hybridc.schedules.cpu.packed.many_rows import many_rows
from hybridc.schedules.cpu.packed.read import read_packed
from hybridc.schedules.cpu.packed.rounded_rows import accepts_rounded_rows, rounded_rows
from hybridc.schedules.cpu.packed.tiled_rows import tiled_rows
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="matmul")
def packed_gemm(request: Request) -> Scheduled | None:
    """Accepts a product with a packed weight (`hybridc/packed/layout.py`), and an epilogue.

    Few rows multiply codes in registers; for many, a task dequantizes parts of a panel into its cache, as
    bf16 if that is asked for. Where rows may be rounded to 8 bits, integers are multiplied.
    """
    packed = read_packed(request.function)
    if packed is None:
        return None
    if accepts_rounded_rows(packed, request):
        made = rounded_rows(packed, request)
        function = function_of(request.function, made.params, made.stages, made.buffers)
        return finish(function, packed_gemm.__name__, made.packings)
    dot = bf16_dot(packed, request)
    if packed.rows <= FEW_ROWS:
        stages, buffers = few_rows(packed, request)
    elif dot is not None and request.target.isa.has_tiles:
        stages, buffers = tiled_rows(packed, request, dot)
    else:
        stages, buffers = many_rows(packed, request, dot)
    function = function_of(request.function, list(request.function.params), stages, buffers)
    return finish(function, packed_gemm.__name__)
