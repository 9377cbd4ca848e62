"""AMX: sums of products of packed lanes in tiles of 16 rows of 16 packed lanes each.

    C[m, n] += sum over k of A[m, k] * B[k, n]

A are 16 pixels (or rows) of 16 packed lanes, B 16 packed lanes of 16 outputs, in the same order as
`dot_products.py` has them, C 256 sums. There are eight tile registers: a micro-kernel keeps up to 2 x 2 tiles
of sums, and loads each A for two B and each B for two A, so that loads take half the time of the products.
(Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on AMX.)

On targets that emulate tiles the same calls find other functions, whose registers are a buffer of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from tvm import ir, tirx

from hybridc.options import BF16
from hybridc.schedules.cpu.core.dot_products import Dot, define, llvm_functions, with_llvm
from hybridc.schedules.cpu.core.micro_kernel import Point, ceil_div, integer, loop, sequence

SIDE = 16
"""Rows of a tile, and packed lanes or sums in a row."""
REGISTERS = 8
LEFT, RIGHT = 4, 7
"""Registers of factors: left ones are 4 and 5 in turn, right ones count down from 7. Sums are 0 to 3."""
ROW_BYTES = 64
_CONFIG = "hybridc_tile_config"

Address = tuple[tirx.BufferLoad, ir.Expr]
"""First packed lane of a tile in memory, and bytes from one row to the next."""


@dataclass(frozen=True, slots=True)
class TileUnit:
    """Calls of tile instructions, for one task."""

    dot: Dot
    state: ir.Var
    """What stands for the registers where they are emulated; one unused packed lane elsewhere."""
    words: int = SIDE
    """Packed lanes in a row of a left factor, and rows of a right one."""

    def within(self, body: tirx.Stmt) -> tirx.Stmt:
        """A task that uses tiles."""
        start = [tirx.AllocBuffer(self.state), self.whole(self.state), self._call("begin")]
        return sequence([*start, body, self._call("end")])

    def whole(self, buffer: ir.Var) -> tirx.Stmt:
        """Does nothing; TVM would allocate no more of a buffer than what it sees used."""
        last = tirx.BufferLoad(buffer, [integer(int(extent) - 1) for extent in buffer.shape])
        return self._call("whole", tirx.address_of(last))

    def zero(self, tile: int) -> tirx.Stmt:
        """Clear a tile register."""
        return self._call(f"zero_{tile}")

    def load(self, tile: int, address: Address) -> tirx.Stmt:
        """Fill a tile register from an address and the distance of its rows in bytes."""
        return self._call(f"load_{tile}", tirx.address_of(address[0]), address[1])

    def store(self, tile: int, address: Address) -> tirx.Stmt:
        """Write a tile register to an address and the distance of its rows in bytes."""
        return self._call(f"store_{tile}", tirx.address_of(address[0]), address[1])

    def multiply_add(self, sums: int, left: int, right: int) -> tirx.Stmt:
        """Add the product of two tile registers to a third one."""
        return self._call(f"{self.dot.precision}_{sums}_{left}_{right}")

    def fetch_ahead(self, first: tirx.BufferLoad, offset_bytes: ir.Expr, lines: int) -> tirx.Stmt:
        """Begin to read cache lines at a distance from an element into the second level; they need not
        exist."""
        # TVM may narrow what is computed of indices to 32 bits, but no call is inlined that has other types
        places = (tirx.Cast("int32", offset_bytes + integer(ROW_BYTES * i)) for i in range(lines))
        return sequence([self._call("prefetch", tirx.address_of(first), place) for place in places])

    def _call(self, name: str, *arguments: ir.Expr) -> tirx.Stmt:
        first = tirx.address_of(tirx.BufferLoad(self.state, [integer(0)]))
        function = f"hybridc_tile_{name}_of_{self.words}"
        return tirx.Evaluate(tirx.call_extern("void", function, first, *arguments))


def tile_unit(dot: Dot, words: int = SIDE) -> TileUnit:
    """The instructions for a kind of products; emulated ones keep the registers in a buffer.

    Factors have `words` packed lanes at most 16; with fewer, a micro-kernel has up to two columns of tiles.
    """
    size = REGISTERS * SIDE * SIDE if dot.emulated else 1
    return TileUnit(dot, tirx.decl_buffer((size,), "int32", "tiles"), words)


def with_tiles(dot: Dot, body: tirx.Stmt, words: int = SIDE) -> tirx.Stmt:
    """A statement that may call tile instructions, on factors of so many packed lanes."""
    return with_llvm(f"{llvm_functions(dot.emulated)}\n{_functions(dot.emulated, words)}", body)


@dataclass(frozen=True, slots=True)
class Passes:
    """Micro-kernels that take the same right factors: while they do, each reads a part of the next ones from
    the last-level cache, whose bandwidth would otherwise be idle but in the first of them."""

    number: ir.Expr
    """Which of them."""
    count: int
    distance_bytes: int
    """From right factors to the next ones; both lie in the order of the loops over products."""

    def fetch(self, unit: TileUnit, first: tirx.BufferLoad, columns: int) -> tirx.Stmt:
        """The part of a step, whose right factors begin at `first`."""
        lines = ceil_div(columns * unit.words, self.count)
        offset = integer(self.distance_bytes) + self.number * integer(ROW_BYTES * lines)
        return unit.fetch_ahead(first, offset, lines)


SHAPES = ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2))
"""Tiles of rows and of columns that a micro-kernel may have."""


def tile_shape(vectors: int) -> tuple[int, int]:
    """The largest micro-kernel where there are so many vectors of columns."""
    return (2, 2) if vectors % 2 == 0 else (3, 1)


def tile_kernel(
    unit: TileUnit,
    shape: tuple[int, int],
    extents: Sequence[int],
    left: Callable[[Point, int], Address],
    right: Callable[[Point, int], Address],
    write: Callable[[int, int, ir.Expr, Callable[[ir.Expr], ir.Expr]], tirx.Stmt],
    passes: Passes | None = None,
) -> tirx.Stmt:
    """Sums over loops of `extents`, whose indices `left` and `right` get with the number of the tile.

    `write(i, j, m, sum_at)` stores row m of tile (i, j), of which `sum_at(lane)` is a sum.
    """
    rows, columns = shape
    sums = tirx.decl_buffer((rows * columns, SIDE, SIDE), unit.dot.sum_dtype, "tile_sums")
    pairs = [(i, j) for i in range(rows) for j in range(columns)]

    def number(i: int, j: int) -> int:
        return i * columns + j

    def step(k: Point) -> tirx.Stmt:
        loads = [unit.load(RIGHT - j, right(k, j)) for j in range(columns)]
        for i in range(rows):
            loads.append(unit.load(LEFT + i % 2, left(k, i)))
            loads += [unit.multiply_add(number(i, j), LEFT + i % 2, RIGHT - j) for j in range(columns)]
        return sequence(loads if passes is None else [passes.fetch(unit, right(k, 0)[0], columns), *loads])

    def nest(k: tuple[ir.Expr, ...]) -> tirx.Stmt:
        return step(k) if len(k) == len(extents) else loop(extents[len(k)], lambda i: nest((*k, i)))

    def row_of(i: int, j: int) -> Callable[[ir.Expr], tirx.Stmt]:
        def sum_at(m: ir.Expr) -> Callable[[ir.Expr], ir.Expr]:
            return lambda lane: tirx.BufferLoad(sums, [integer(number(i, j)), m, lane])

        return lambda m: write(i, j, m, sum_at(m))

    def stored(i: int, j: int) -> tirx.Stmt:
        first = tirx.BufferLoad(sums, [integer(number(i, j)), integer(0), integer(0)])
        return unit.store(number(i, j), (first, integer(ROW_BYTES)))

    zeros = [unit.zero(number(i, j)) for i, j in pairs]
    stores = [stored(i, j) for i, j in pairs]
    writes = [loop(SIDE, row_of(i, j)) for i, j in pairs]
    return sequence([tirx.AllocBuffer(sums), unit.whole(sums), *zeros, nest(()), *stores, *writes])


@cache
def _functions(emulated: bool, words: int) -> str:
    make = _emulated if emulated else _native
    triples = {
        (i * columns + j, LEFT + i % 2, RIGHT - j)
        for rows, columns in SHAPES
        for i in range(rows)
        for j in range(columns)
    }
    return make(sorted(triples), words)


def _shape(register: int, words: int) -> tuple[int, int]:
    """Rows of a register and packed lanes in each, where factors have so many packed lanes."""
    if register < LEFT or words == SIDE:
        return SIDE, SIDE
    return (SIDE, words) if register < LEFT + 2 else (words, SIDE)


def _native(triples: Sequence[tuple[int, int, int]], words: int) -> str:
    shapes = [_shape(register, words) for register in range(REGISTERS)]
    row_bytes = [part for _, lanes in shapes for part in (4 * lanes, 0)]
    config = [1, *[0] * 15, *row_bytes, *[0] * 16, *[rows for rows, _ in shapes], *[0] * 8]
    text = "".join(f"\\{byte:02X}" for byte in config)
    name = f"@{_CONFIG}_of_{words}"
    lines = [
        f'{name} = linkonce_odr hidden constant [64 x i8] c"{text}", align 64',
        "declare void @llvm.x86.ldtilecfg(ptr)",
        "declare void @llvm.x86.tilerelease()",
        "declare void @llvm.x86.tilezero(i8)",
        "declare void @llvm.x86.tileloadd64(i8, ptr, i64)",
        "declare void @llvm.x86.tilestored64(i8, ptr, i64)",
        "declare void @llvm.x86.tdpbf16ps(i8, i8, i8)",
        "declare void @llvm.x86.tdpbusd(i8, i8, i8)",
        _define("begin", words, "", f"call void @llvm.x86.ldtilecfg(ptr {name})"),
        _define("end", words, "", "call void @llvm.x86.tilerelease()"),
        *_helpers(words),
    ]
    at = "ptr %p, i64 %stride"
    for t in range(REGISTERS):
        lines += [
            _define(f"zero_{t}", words, "", f"call void @llvm.x86.tilezero(i8 {t})"),
            _define(f"load_{t}", words, at, f"call void @llvm.x86.tileloadd64(i8 {t}, {at})"),
            _define(f"store_{t}", words, at, f"call void @llvm.x86.tilestored64(i8 {t}, {at})"),
        ]
    for c, a, b in triples:
        for precision, instruction in (("bf16", "tdpbf16ps"), ("int8", "tdpbusd")):
            call = f"call void @llvm.x86.{instruction}(i8 {c}, i8 {a}, i8 {b})"
            lines.append(_define(f"{precision}_{c}_{a}_{b}", words, "", call))
    return "\n".join(lines)


def _helpers(words: int) -> list[str]:
    # read, once, into the second level, data
    fetch = "call void @llvm.prefetch.p0(ptr %q, i32 0, i32 2, i32 1)"
    return [
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        _define("whole", words, "ptr %p"),
        _define("prefetch", words, "ptr %p, i32 %at", "%q = getelementptr i8, ptr %p, i32 %at", fetch),
    ]


def _emulated(triples: Sequence[tuple[int, int, int]], words: int) -> str:
    """Tiles are 1024 bytes each from `state` on."""
    lines = [_define("begin", words), _define("end", words), *_helpers(words)]
    at = "ptr %p, i64 %stride"
    for t in range(REGISTERS):
        rows, lanes = _shape(t, words)
        row = f"<{lanes} x i32>"
        zeros, loads, stores = [], [], []
        for m in range(rows):
            own = f"%r{m} = getelementptr i8, ptr %state, i64 {(t * SIDE + m) * ROW_BYTES}"
            other = [f"%o{m} = mul i64 %stride, {m}", f"%p{m} = getelementptr i8, ptr %p, i64 %o{m}", own]
            zeros += [own, f"store {row} zeroinitializer, ptr %r{m}, align 4"]
            loads += [
                *other,
                f"%v{m} = load {row}, ptr %p{m}, align 4",
                f"store {row} %v{m}, ptr %r{m}, align 4",
            ]
            stores += [
                *other,
                f"%v{m} = load {row}, ptr %r{m}, align 4",
                f"store {row} %v{m}, ptr %p{m}, align 4",
            ]
        lines += [
            _define(f"zero_{t}", words, "", *zeros),
            _define(f"load_{t}", words, at, *loads),
            _define(f"store_{t}", words, at, *stores),
        ]
    for precision in ("bf16", "int8"):
        lines.append(_emulated_product(precision, words))
        for c, a, b in triples:
            tiles = ", ".join(f"i64 {t * SIDE * ROW_BYTES}" for t in (c, a, b))
            call = f"call void @hybridc_emulated_{precision}_of_{words}(ptr %state, {tiles})"
            lines.append(_define(f"{precision}_{c}_{a}_{b}", words, "", call))
    return "\n".join(lines)


def _emulated_product(precision: str, depth: int) -> str:
    """Row by row: a packed lane of A after the other is multiplied with its row of B."""
    words = f"<{SIDE} x i32>"
    sums = f"<{SIDE} x float>" if precision == BF16 else words
    dot = f"@hybridc_{precision}_dot_{SIDE}"
    lines = [
        "%pc = getelementptr i8, ptr %state, i64 %c",
        "%pa = getelementptr i8, ptr %state, i64 %a",
        "%pb = getelementptr i8, ptr %state, i64 %b",
        "br label %row",
        "row:",
        "%m = phi i64 [ 0, %entry ], [ %next, %row ]",
        f"%o = mul i64 %m, {ROW_BYTES}",
        "%pcm = getelementptr i8, ptr %pc, i64 %o",
        "%pam = getelementptr i8, ptr %pa, i64 %o",
        f"%s0 = load {sums}, ptr %pcm, align 4",
    ]
    for k in range(depth):
        lines += [
            f"%pa{k} = getelementptr i32, ptr %pam, i64 {k}",
            f"%a{k} = load i32, ptr %pa{k}, align 4",
            f"%i{k} = insertelement {words} poison, i32 %a{k}, i64 0",
            f"%x{k} = shufflevector {words} %i{k}, {words} poison, {words} zeroinitializer",
            f"%pb{k} = getelementptr i8, ptr %pb, i64 {k * ROW_BYTES}",
            f"%y{k} = load {words}, ptr %pb{k}, align 4",
            f"%s{k + 1} = call {sums} {dot}({sums} %s{k}, {words} %x{k}, {words} %y{k})",
        ]
    lines += [
        f"store {sums} %s{depth}, ptr %pcm, align 4",
        "%next = add i64 %m, 1",
        f"%done = icmp eq i64 %next, {SIDE}",
        "br i1 %done, label %end, label %row",
        "end:",
        "ret void",
    ]
    name = f"@hybridc_emulated_{precision}_of_{depth}"
    head = f"define linkonce_odr hidden void {name}(ptr %state, i64 %c, i64 %a, i64 %b) {{"
    return head + "\nentry:\n  " + "\n  ".join(lines) + "\n}"


def _define(name: str, words: int, parameters: str = "", *lines: str) -> str:
    every = ", ".join(filter(None, ("ptr %state", parameters)))
    return define(f"void @hybridc_tile_{name}_of_{words}({every})", *lines, "ret void")
