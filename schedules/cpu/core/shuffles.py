"""Vectors made of pieces that do not lie in the order in which they are written.

Each function gives statements and, after them, vectors. A tree of two-input shuffles is what LLVM turns into
`vunpcklps`, `vinsertf128` from memory and `vpermt2ps`; shuffles of more inputs it takes apart lane by lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import ir, tirx

COLUMNS = 4
"""Columns that one transposition turns into vectors: the elements of 128 bits, which x86 shuffles as one."""


def transposed(
    piece: Callable[[int], ir.Expr], lanes: int, dtype: str
) -> tuple[list[tirx.Stmt], list[ir.Expr]]:
    """`piece(row)` are `COLUMNS` elements of each of `lanes` rows; the columns, as vectors of `lanes`.

    Rows are loaded into the 128-bit parts of registers so that what is left are two steps of shuffles
    within the parts: 2 * `COLUMNS` shuffles for `COLUMNS` vectors of any width.
    """
    statements: list[tirx.Stmt] = []

    def named(value: ir.Expr) -> ir.Expr:
        var = tirx.Var("v", f"{dtype}x{lanes}")
        statements.append(tirx.Bind(var, value))
        return var

    def pairs(a: ir.Expr, b: ir.Expr, order: Sequence[int]) -> ir.Expr:
        indices = [
            part + (lane if lane < COLUMNS else lanes + lane - COLUMNS)
            for part in range(0, lanes, COLUMNS)
            for lane in order
        ]
        return named(tirx.Shuffle([a, b], indices))

    # row r of each group of four becomes one register, so that the steps below stay within 128 bits
    rows = [
        named(tirx.Shuffle([piece(part + row) for part in range(0, lanes, COLUMNS)], list(range(lanes))))
        for row in range(COLUMNS)
    ]
    # `vunpcklps` and `vunpckhps`: two rows, interleaved element by element
    low, high = (0, 4, 1, 5), (2, 6, 3, 7)
    halves = [pairs(rows[r], rows[r + 1], order) for order in (low, high) for r in (0, 2)]
    # `vunpcklpd` and `vunpckhpd`: pairs of two rows become columns of four
    low, high = (0, 1, 4, 5), (2, 3, 6, 7)
    columns = [pairs(halves[h], halves[h + 1], order) for h in (0, 2) for order in (low, high)]
    return statements, columns


def picked(vectors: Sequence[ir.Expr], picks: Sequence[tuple[int, int]]) -> ir.Expr:
    """A vector whose elements are `(vector, lane)` of vectors with as many lanes each."""
    lanes = len(picks)
    # one vector is added at a time: `vpermt2ps` takes two
    used = sorted({vector for vector, _ in picks})
    result = tirx.Shuffle([vectors[used[0]]], [lane if v == used[0] else 0 for v, lane in picks])
    for k in used[1:]:
        indices = [lanes + lane if v == k else place for place, (v, lane) in enumerate(picks)]
        result = tirx.Shuffle([result, vectors[k]], indices)
    return result


def sums_of_lanes(vectors: Sequence[ir.Expr], lanes: int) -> tuple[list[tirx.Stmt], ir.Expr]:
    """Statements, and behind them the vector whose element i is the sum of the lanes of the i-th vector.

    A tree: two vectors of groups of g lanes become one of groups of g / 2, whose first half are the first
    one's groups (two shuffles and an addition). Elements for which there is no vector are arbitrary.
    """
    statements: list[tirx.Stmt] = []

    def bind(value: ir.Expr) -> ir.Var:
        statements.append(tirx.Bind(var := tirx.Var("v", f"float32x{lanes}"), value))
        return var

    level = [bind(v) for v in vectors]
    # lanes without a vector repeat the last one, which is computed anyway
    level += [level[-1]] * (lanes - len(level))
    group = lanes
    # log2(lanes) levels, each with half as many vectors as the one before
    while group > 1:
        half = group // 2
        low = [v + i + j for v in (0, lanes) for i in range(0, lanes, group) for j in range(half)]
        pairs = list(zip(level[::2], level[1::2], strict=True))
        level = []
        for a, b in pairs:
            both = [bind(tirx.Shuffle([a, b], [i + side for i in low])) for side in (0, half)]
            level.append(bind(both[0] + both[1]))
        group = half
    return statements, level[0]
