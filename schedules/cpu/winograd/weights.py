"""Winograd's transform of weights that are only known at run time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import PARALLEL_WORK, Point, grid, integer, sequence
from hybridc.schedules.cpu.winograd.toom_cook import ToomCook


def transform_weights(weight: ir.Var, packed: ir.Var, algorithm: ToomCook) -> tirx.Stmt:
    """`G w G^T` of weights `[OB, IB, 3, 3, i, o]`, as U `[pass, k, q, group, IB, i, vector, o]`.

    Vectors of output channels; what is behind the last block is left as it is: its products are never read.
    """
    passes, _, _, groups, _, _, width, lanes = (int(e) for e in packed.shape)
    blocks, input_blocks, inputs = (int(weight.shape[axis]) for axis in (0, 1, 4))
    matrix = algorithm.filter_matrix()

    def task(point: Point) -> tirx.Stmt:
        block, ib, i = point
        vector = tirx.floormod(block, integer(width))
        group = tirx.floormod(tirx.floordiv(block, integer(width)), integer(groups))
        number = tirx.floordiv(block, integer(width * groups)) if passes > 1 else integer(0)
        lane = tirx.Ramp(integer(0), integer(1), lanes)
        statements: list[tirx.Stmt] = []

        def named(value: ir.Expr) -> ir.Expr:
            var = tirx.Var("u", f"float32x{lanes}")
            statements.append(tirx.Bind(var, value))
            return var

        taps = [
            [named(tirx.BufferLoad(weight, [block, ib, integer(a), integer(b), i, lane])) for b in range(3)]
            for a in range(3)
        ]
        columns = [
            [named(_combined(row, [taps[a][b] for a in range(3)])) for b in range(3)] for row in matrix
        ]
        for k, half in enumerate(columns):
            for q, row in enumerate(matrix):
                at = [number, integer(k), integer(q), group, ib, i, vector, lane]
                statements.append(tirx.BufferStore(packed, _combined(row, half), at))
        return sequence(statements)

    work = math.prod(int(e) for e in packed.shape)
    return grid((blocks, input_blocks, inputs), task, parallel=work >= PARALLEL_WORK)


def _combined(factors: Sequence[float], vectors: Sequence[ir.Expr]) -> ir.Expr:
    terms = [
        vector if factor == 1 else vector * tirx.FloatImm("float32", factor)
        for factor, vector in zip(factors, vectors, strict=True)
        if factor
    ]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
