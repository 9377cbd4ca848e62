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
from hybridc.schedules.cpu.core.micro_kernel import Point, integer, loop, sequence

SIDE = 16
"""Rows of a tile, and packed lanes or sums in a row."""
REGISTERS = 8
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

    def _call(self, name: str, *arguments: ir.Expr) -> tirx.Stmt:
        first = tirx.address_of(tirx.BufferLoad(self.state, [integer(0)]))
        return tirx.Evaluate(tirx.call_extern("void", f"hybridc_tile_{name}", first, *arguments))


def tile_unit(dot: Dot) -> TileUnit:
    """The instructions for a kind of products; emulated ones keep the registers in a buffer."""
    words = REGISTERS * SIDE * SIDE if dot.emulated else 1
    return TileUnit(dot, tirx.decl_buffer((words,), "int32", "tiles"))


def with_tiles(dot: Dot, body: tirx.Stmt) -> tirx.Stmt:
    """A statement that may call tile instructions."""
    return with_llvm(f"{llvm_functions(dot.emulated)}\n{_functions(dot.emulated)}", body)


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
) -> tirx.Stmt:
    """Sums over loops of `extents`, whose indices `left` and `right` get with the number of the tile.

    `write(i, j, m, sum_at)` stores row m of tile (i, j), of which `sum_at(lane)` is a sum.
    """
    rows, columns = shape
    sums = tirx.decl_buffer((rows * columns, SIDE, SIDE), unit.dot.sum_dtype, "tile_sums")
    pairs = [(i, j) for i in range(rows) for j in range(columns)]
    first_left, first_right = len(pairs), len(pairs) + rows

    def number(i: int, j: int) -> int:
        return i * columns + j

    def step(k: Point) -> tirx.Stmt:
        loads = [unit.load(first_right + j, right(k, j)) for j in range(columns)]
        for i in range(rows):
            loads.append(unit.load(first_left + i, left(k, i)))
            loads += [
                unit.multiply_add(number(i, j), first_left + i, first_right + j) for j in range(columns)
            ]
        return sequence(loads)

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
def _functions(emulated: bool) -> str:
    make = _emulated if emulated else _native
    triples = [
        (c, a, b)
        for rows, columns in SHAPES
        for c in range(rows * columns)
        for a in (rows * columns + c // columns,)
        for b in (rows * columns + rows + c % columns,)
    ]
    return make(sorted(set(triples)))


def _native(triples: Sequence[tuple[int, int, int]]) -> str:
    config = [1, *[0] * 15, *[ROW_BYTES, 0] * REGISTERS, *[0] * 16, *[SIDE] * REGISTERS, *[0] * 8]
    text = "".join(f"\\{byte:02X}" for byte in config)
    lines = [
        f'@{_CONFIG} = linkonce_odr hidden constant [64 x i8] c"{text}", align 64',
        "declare void @llvm.x86.ldtilecfg(ptr)",
        "declare void @llvm.x86.tilerelease()",
        "declare void @llvm.x86.tilezero(i8)",
        "declare void @llvm.x86.tileloadd64(i8, ptr, i64)",
        "declare void @llvm.x86.tilestored64(i8, ptr, i64)",
        "declare void @llvm.x86.tdpbf16ps(i8, i8, i8)",
        "declare void @llvm.x86.tdpbusd(i8, i8, i8)",
        _define("begin(ptr %state)", f"call void @llvm.x86.ldtilecfg(ptr @{_CONFIG})"),
        _define("end(ptr %state)", "call void @llvm.x86.tilerelease()"),
        _define("whole(ptr %state, ptr %p)"),
    ]
    for t in range(REGISTERS):
        at = f"(i8 {t}, ptr %p, i64 %stride)"
        lines += [
            _define(f"zero_{t}(ptr %state)", f"call void @llvm.x86.tilezero(i8 {t})"),
            _define(f"load_{t}(ptr %state, ptr %p, i64 %stride)", f"call void @llvm.x86.tileloadd64{at}"),
            _define(f"store_{t}(ptr %state, ptr %p, i64 %stride)", f"call void @llvm.x86.tilestored64{at}"),
        ]
    for c, a, b in triples:
        for precision, instruction in (("bf16", "tdpbf16ps"), ("int8", "tdpbusd")):
            call = f"call void @llvm.x86.{instruction}(i8 {c}, i8 {a}, i8 {b})"
            lines.append(_define(f"{precision}_{c}_{a}_{b}(ptr %state)", call))
    return "\n".join(lines)


def _emulated(triples: Sequence[tuple[int, int, int]]) -> str:
    """Tiles are 1024 bytes each from `state` on."""
    row = f"<{SIDE} x i32>"
    lines = [_define("begin(ptr %state)"), _define("end(ptr %state)"), _define("whole(ptr %state, ptr %p)")]
    for t in range(REGISTERS):
        zeros, loads, stores = [], [], []
        for m in range(SIDE):
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
            _define(f"zero_{t}(ptr %state)", *zeros),
            _define(f"load_{t}(ptr %state, ptr %p, i64 %stride)", *loads),
            _define(f"store_{t}(ptr %state, ptr %p, i64 %stride)", *stores),
        ]
    for precision in ("bf16", "int8"):
        lines.append(_emulated_product(precision))
        for c, a, b in triples:
            tiles = ", ".join(f"i64 {t * SIDE * ROW_BYTES}" for t in (c, a, b))
            call = f"call void @hybridc_emulated_{precision}(ptr %state, {tiles})"
            lines.append(_define(f"{precision}_{c}_{a}_{b}(ptr %state)", call))
    return "\n".join(lines)


def _emulated_product(precision: str) -> str:
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
    for k in range(SIDE):
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
        f"store {sums} %s{SIDE}, ptr %pcm, align 4",
        "%next = add i64 %m, 1",
        f"%done = icmp eq i64 %next, {SIDE}",
        "br i1 %done, label %end, label %row",
        "end:",
        "ret void",
    ]
    name = f"@hybridc_emulated_{precision}"
    head = f"define linkonce_odr hidden void {name}(ptr %state, i64 %c, i64 %a, i64 %b) {{"
    return head + "\nentry:\n  " + "\n  ".join(lines) + "\n}"


def _define(signature: str, *lines: str) -> str:
    return define(f"void @hybridc_tile_{signature}", *lines, "ret void")
