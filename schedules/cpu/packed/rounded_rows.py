"""Rows times a matrix of 4-bit codes, in integers: a row is rounded to 8 bits, with a step for each block.

    sum of a * scale * (code - zero)  ~  scale * step * (sum of q * code  -  zero * sum of q)

where step = largest |a| of the block / 127 and q = a / step, rounded to nearest even. That is what
onnxruntime does where MatMulNBits has `accuracy_level` 4 (`MlasQNBitGemm`, `SQNBIT_CompInt8`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from tvm import ir, tirx

from hybridc.schedules.cpu.core.dot_products import Dot, dot_of_int8
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Tile,
    ceil_div,
    clamp,
    grid,
    integer,
    loop,
    sequence,
    when,
    write_columns,
)
from hybridc.schedules.cpu.core.register_tile import RegisterTile, register_tile
from hybridc.schedules.cpu.packed.few_rows import FEW_ROWS
from hybridc.schedules.cpu.packed.instructions import (
    STEPS_OF_16_BITS,
    largest,
    multiply_16_bits,
    rounded,
    total,
    widen,
    within,
)
from hybridc.schedules.cpu.packed.read import Packed
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request
from hybridc.targets import Isa

_BYTES = 4
"""Of a word: codes of the lower bits are one quad of k, those of the upper bits another one."""
_LARGEST_BYTE = 127.0
_LEAST = 1e-30
"""Blocks of smaller numbers count as zero: 127 / a must be finite."""
_SPARE_REGISTERS = 6
"""For codes, a broadcast word, the mask, and what LLVM needs beside sums."""
_MOST_VECTORS = 4
"""Of columns with one sum each: a load of their codes is in flight while those before are multiplied."""
_ROWS_OF_PAIRS = 4
"""Of a tile of two vectors: 4 and, with dot products, 5 were the fastest of 3 to 6 on Zen 5."""


@dataclass(frozen=True, slots=True)
class RoundedProduct:
    """A product whose rows are rounded, as its function shall be."""

    params: tuple[ir.Var, ...]
    stages: list[tirx.Stmt]
    buffers: list[ir.Var]
    packings: tuple[tuple[int, Packing], ...]


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is left of the rows."""

    words: ir.Var
    """`[rows, depth / 4]`: bytes."""
    steps: ir.Var
    """`[rows, blocks]`: what a byte counts, float32."""
    totals: ir.Var
    """`[rows, blocks]`: sums of the bytes, int32."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    packed: Packed
    codes: ir.Var
    """`[panels, parts, words of a column, columns of a part]`."""
    rows: _Rows
    tile: Tile
    """Rows and columns of sums that stay in registers."""
    dot: Dot | None
    """None: products are added up in 16 bits first."""

    @property
    def together(self) -> int:
        """Columns of a part."""
        return int(self.codes.shape[-1])

    @property
    def words_of_span(self) -> int:
        return self.packed.bytes_of_span // _BYTES


def accepts_rounded_rows(packed: Packed, request: Request) -> bool:
    """Whether rows may be rounded, their codes have such a form, and rows lie along the depth."""
    if not packed.rounds_rows or not request.int8_activations or _position(packed, request) is None:
        return False
    if packed.layout.bits != 4 or packed.layout.exponent or packed.bytes_of_span % _BYTES:
        return False
    return packed.has_rows_along_depth


def rounded_rows(packed: Packed, request: Request) -> RoundedProduct:
    """The stages of a product that `accepts_rounded_rows` takes.

    Rows are rounded in front of the product. A task is a panel of columns; the words of its codes are those
    of the model in another order, one vector of columns after the other, for any number of rows.
    """
    position = _position(packed, request)
    assert position is not None
    height, isa = packed.depth // packed.layout.codes_in_byte, request.target.isa
    words, parts = height // _BYTES, _parts(packed, isa)
    together = packed.width // parts
    codes = tirx.decl_buffer((packed.panels, parts, words, together), "int32", packed.codes.name)
    packing = Packing(
        (packed.panels, height, packed.width),
        (packed.panels, words, _BYTES, parts, together),
        (0, 3, 1, 4, 2),
        vnni_dtype="uint8",
    )
    parameters = [codes if p.same_as(packed.codes) else p for p in request.function.params]
    rows = _Rows(
        tirx.decl_buffer((packed.rows, packed.depth // _BYTES), "int32", "words"),
        tirx.decl_buffer((packed.rows, packed.blocks), "float32", "steps"),
        tirx.decl_buffer((packed.rows, packed.blocks), "int32", "totals"),
    )
    kernel = _Kernel(packed, codes, rows, _tile(packed, request), _dot(isa))
    body = grid((packed.panels,), lambda at: _panel(kernel, at[0]), parallel=True)
    stages = [within(_rounded(packed, rows, isa.lanes())), within(body)]
    if kernel.dot is not None:
        stages[1] = kernel.dot.within(stages[1])
    return RoundedProduct(
        tuple(parameters), stages, [rows.words, rows.steps, rows.totals], ((position, packing),)
    )


def _parts(packed: Packed, isa: Isa) -> int:
    """Of a panel: the codes of the columns that one row is multiplied with at once lie side by side. Memory
    is read fastest in the order of its addresses: every other 128 bytes took 1.35 times as long on Zen 3."""
    together = _MOST_VECTORS * isa.lanes()
    return packed.width // together if packed.width % together == 0 else 1


def _dot(isa: Isa) -> Dot | None:
    """How words are multiplied in one instruction; of pairs of int16 the codes would be extended first."""
    dot = dot_of_int8(isa)
    return dot if dot.has_bytes else None


def _position(packed: Packed, request: Request) -> int | None:
    """Of the codes among constants, which alone are packed."""
    position = packed.contraction.nest.parameter(packed.codes)
    return position if position in request.constants else None


def _tile(packed: Packed, request: Request) -> Tile:
    """Sums of a block and those of all blocks share the registers. Groups of rows are as even as possible.

    Of many rows a broadcast word serves two vectors, if there are registers enough.
    """
    isa, lanes = request.target.isa, request.target.isa.lanes()
    sums = (isa.vector_registers - _SPARE_REGISTERS) // 2
    if packed.rows > FEW_ROWS and sums >= 2 * _ROWS_OF_PAIRS and packed.width % (2 * lanes) == 0:
        # sums of 16 bits need registers, too
        most = _ROWS_OF_PAIRS if _dot(isa) is None else _ROWS_OF_PAIRS + 1
        return Tile(_evenly(packed.rows, most), 1, 2, lanes)
    rows = _evenly(packed.rows, min(sums, FEW_ROWS))
    vectors = max(
        v for v in (1, 2, _MOST_VECTORS) if v == 1 or (v * rows <= sums and v * lanes <= packed.width)
    )
    return Tile(rows, 1, vectors, lanes)


def _evenly(rows: int, most: int) -> int:
    """Rows of a group, at most so many."""
    return ceil_div(rows, ceil_div(rows, most))


def _rounded(packed: Packed, rows: _Rows, most_lanes: int) -> tirx.Stmt:
    """Words, steps and totals of all rows."""
    lanes = most_lanes if packed.block % most_lanes == 0 else 8
    vectors = packed.block // lanes

    def block(m: ir.Expr, b: ir.Expr) -> tirx.Stmt:
        first = b * integer(packed.block)

        def values(v: int) -> ir.Expr:
            return packed.row_at(m, tirx.Ramp(first + integer(v * lanes), integer(1), lanes))

        # of numbers without a sign the order is that of their bits, where infinity and NaN come last
        magnitudes = [
            tirx.reinterpret(f"int32x{lanes}", values(v)) & tirx.const(0x7FFFFFFF, f"int32x{lanes}")
            for v in range(vectors)
        ]
        most = tirx.reinterpret("float32", largest(reduce(tirx.max, magnitudes)))
        step = tirx.BufferLoad(rows.steps, [m, b])
        zero = tirx.const(0, "float32")
        inverse = tirx.Select(step > tirx.const(_LEAST, "float32"), _LARGEST_BYTE / step, zero)

        def numbers(v: int) -> ir.Expr:
            return tirx.Cast(f"int8x{lanes}", rounded(values(v) * tirx.Broadcast(inverse, lanes)))

        # what does not fit a byte, NaN and infinity, counts as it does in the product
        sums = [tirx.Cast(f"int32x{lanes}", numbers(v)) for v in range(vectors)]

        def word(v: int) -> tirx.Stmt:
            count = lanes // _BYTES
            start = b * integer(packed.block // _BYTES) + integer(v * count)
            return tirx.BufferStore(
                rows.words,
                tirx.reinterpret(f"int32x{count}", numbers(v)),
                [m, tirx.Ramp(start, integer(1), count)],
            )

        return sequence(
            [
                tirx.BufferStore(rows.steps, most, [m, b]),
                tirx.BufferStore(rows.totals, total(reduce(lambda a, c: a + c, sums)), [m, b]),
                *(word(v) for v in range(vectors)),
                tirx.BufferStore(rows.steps, step * tirx.const(1 / _LARGEST_BYTE, "float32"), [m, b]),
            ]
        )

    return grid(
        (packed.rows, packed.blocks),
        lambda at: block(at[0], at[1]),
        parallel=packed.rows * packed.depth >= PARALLEL_WORK,
    )


def _panel(kernel: _Kernel, panel: ir.Expr) -> tirx.Stmt:
    """Parts of a panel stay in cache while all rows are multiplied."""
    packed, tile = kernel.packed, kernel.tile
    groups = ceil_div(packed.rows, tile.rows)
    parts = packed.width // tile.columns
    return loop(parts, lambda part: loop(groups, lambda group: _part(kernel, (panel, part), group)))


def _part(kernel: _Kernel, at: tuple[ir.Expr, ir.Expr], group: ir.Expr) -> tirx.Stmt:
    packed, tile, (panel, part) = kernel.packed, kernel.tile, at
    whole = packed.rows % tile.rows == 0
    sums = register_tile(tile.rows, tile.vectors, tile.lanes)
    inner = register_tile(tile.rows, tile.vectors, tile.lanes, "int32")

    def row(m: int) -> ir.Expr:
        return group * integer(tile.rows) + integer(m)

    def read_row(m: int) -> ir.Expr:
        return clamp(row(m), packed.rows, inside=whole)

    def column(v: ir.Expr, lane: ir.Expr) -> ir.Expr:
        return part * integer(tile.columns) + v * integer(tile.lanes) + lane

    def block(b: ir.Expr) -> tirx.Stmt:
        def scaled(m: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
            place = (panel, b, column(v, lane))
            value = inner.sum_at(m, v, lane).astype("float32")
            if packed.zeros is not None:
                value = value - packed.zero_at(*place) * _total(m, b).astype("float32")
            step = tirx.BufferLoad(kernel.rows.steps, [read_row(m), b])
            return sums.sum_at(m, v, lane) + packed.scale_at(*place) * (step * value)

        def _total(m: int, b: ir.Expr) -> ir.Expr:
            return tirx.BufferLoad(kernel.rows.totals, [read_row(m), b])

        # what one zero for all subtracts is there before the products are
        zero = packed.layout.zero if packed.zeros is None else 0
        start = inner.set(lambda m, v, lane: _total(m, b) * tirx.const(-zero, "int32"))
        spans = packed.block // packed.span
        products = loop(
            spans,
            lambda s: _span(kernel, inner, (panel, b * integer(spans) + s), read_row, column),
        )
        return inner.within([start, products, sums.set(scaled)])

    first = panel * integer(packed.width) + part * integer(tile.columns)

    def stored(m: int, v: int) -> tirx.Stmt:
        vector = write_columns(
            first,
            packed.columns,
            tile,
            integer(v),
            lambda place, lane: packed.store(row(m), place, sums.sum_at(m, integer(v), lane)),
        )
        return when(row(m) < integer(packed.rows), vector, always=whole)

    stores = [stored(m, v) for m in range(tile.rows) for v in range(tile.vectors)]
    store = packed.where_columns_are(first, sequence(stores))
    return sums.within([sums.clear(), loop(packed.blocks, block), store])


def _span(
    kernel: _Kernel,
    inner: RegisterTile,
    at: tuple[ir.Expr, ir.Expr],
    read_row: Callable[[int], ir.Expr],
    column: Callable[[ir.Expr, ir.Expr], ir.Expr],
) -> tirx.Stmt:
    """The words of a span: their lower codes belong to its first half of k, the upper ones to the other."""
    tile, words = kernel.tile, kernel.words_of_span
    (panel, span), dot = at, kernel.dot
    lanes = tirx.Ramp(integer(0), integer(1), tile.lanes)
    mask = tirx.const(0x0F0F0F0F, f"int32x{tile.lanes}")

    def multiplied(target: RegisterTile, w: int, half: int) -> tirx.Stmt:
        def value(m: int, v: ir.Expr, sums: ir.Expr) -> ir.Expr:
            first = column(v, integer(0))
            word = tirx.BufferLoad(
                kernel.codes,
                [
                    panel,
                    tirx.floordiv(first, integer(kernel.together)),
                    span * integer(words) + integer(w),
                    tirx.Ramp(tirx.floormod(first, integer(kernel.together)), integer(1), tile.lanes),
                ],
            )
            codes = (word >> tirx.const(4 * half, f"int32x{tile.lanes}") if half else word) & mask
            place = span * integer(2 * words) + integer(half * words + w)
            numbers = tirx.Broadcast(tirx.BufferLoad(kernel.rows.words, [read_row(m), place]), tile.lanes)
            multiply = multiply_16_bits if dot is None else dot.multiply_add_vector
            return multiply(sums, codes, numbers)

        return target.set_vectors(value)

    def steps(target: RegisterTile) -> list[tirx.Stmt]:
        return [multiplied(target, w, half) for w in range(words) for half in range(2)]

    if dot is not None:
        return sequence(steps(inner))
    assert 2 * words <= STEPS_OF_16_BITS
    pairs = register_tile(tile.rows, tile.vectors, tile.lanes, "int32")

    def widened(m: int, v: ir.Expr, sums: ir.Expr) -> ir.Expr:
        return widen(sums, pairs.sum_at(m, v, lanes))

    return pairs.within([pairs.clear(), *steps(pairs), inner.set_vectors(widened)])
