"""Products with packed weights, of any number of rows."""

from __future__ import annotations

from hybridc.schedules.cpu.core.micro_kernel import function_of
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.packed.few_rows import few_rows
from hybridc.schedules.cpu.packed.many_rows import many_rows
from hybridc.schedules.cpu.packed.read import read_packed
from hybridc.schedules.cpu.packed.rounded_rows import rounded_rows
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

FEW_ROWS = 8
"""Rows whose sums fit the registers beside a weight that is used once, and need no buffer."""


@schedule_rule(family="matmul")
def packed_gemm(request: Request) -> Scheduled | None:
    """Accepts a product with a packed weight (`hybridc/packed/layout.py`), and an epilogue.

    Few rows multiply codes in registers; for many, a task dequantizes parts of a panel into its cache. Where
    rows may be rounded to 8 bits, integers are multiplied.
    """
    packed = read_packed(request.function)
    if packed is None:
        return None
    if packed.rounds_rows and request.int8_activations:
        made = rounded_rows(packed, request)
        if made is not None:
            function = function_of(request.function, made.params, made.stages, made.buffers)
            return finish(function, packed_gemm.__name__, made.packings)
    exact = few_rows if packed.rows <= FEW_ROWS else many_rows
    stages, buffers = exact(packed, request)
    function = function_of(request.function, list(request.function.params), stages, buffers)
    return finish(function, packed_gemm.__name__)
