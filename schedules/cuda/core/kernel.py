"""Launches that are written statement by statement, for what schedule primitives express badly: vectors of
several types, a row in registers, results that a warp exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tvm import ir, s_tir, tirx
from tvm.ir import Range

from hybridc.schedules.shapes import index_shape

INDEX = "int64"


def integer(value: int) -> tirx.IntImm:
    """An index; 64 bits wide, as offsets into large tensors need. TVM narrows those that do not."""
    return tirx.IntImm(INDEX, value)


@dataclass(frozen=True, slots=True)
class Threads:
    """Position of a thread in its launch."""

    block: ir.Var
    x: ir.Expr
    y: ir.Expr
    """Zero in blocks of one dimension."""


@dataclass(frozen=True, slots=True)
class KernelBuilder:
    """Statements of launches that share nothing but the parameters, and the buffers that they need."""

    original: tirx.PrimFunc
    buffers: list[ir.Var] = field(default_factory=list)

    def registers(self, shape: Sequence[int], dtype: str, name: str = "registers") -> ir.Var:
        """An array of each thread; its indices have to be constants once loops are unrolled."""
        return self._buffer(shape, dtype, name, "local")

    def shared(self, shape: Sequence[int], dtype: str, name: str = "staged") -> ir.Var:
        """An array of each block. TVM puts barriers between what writes and what reads it."""
        return self._buffer(shape, dtype, name, "shared")

    def workspace(self, shape: Sequence[int], dtype: str, name: str = "workspace") -> ir.Var:
        """An array in global memory that launches share."""
        return self._buffer(shape, dtype, name, "global")

    def _buffer(self, shape: Sequence[int], dtype: str, name: str, scope: str) -> ir.Var:
        name = f"{name}_{len(self.buffers)}"
        self.buffers.append(tirx.decl_buffer(index_shape(shape), dtype, name, scope=scope))
        return self.buffers[-1]

    def function(self, launches: Sequence[tirx.Stmt]) -> tirx.PrimFunc:
        """The function whose body is these launches, one after the other."""
        root = s_tir.SBlock([], [], [], "root", sequence(launches), alloc_buffers=self.buffers)
        realize, original = s_tir.SBlockRealize([], True, root), self.original
        return tirx.PrimFunc(original.params, realize, original.ret_type, original.attrs, original.span)


def launch(blocks: int, threads: int | tuple[int, int], body: Callable[[Threads], tirx.Stmt]) -> tirx.Stmt:
    """One launch of so many blocks, each of `threads` along x, or along x and y."""
    across, down = threads if isinstance(threads, tuple) else (threads, 1)
    block, x, y = (tirx.Var(name, INDEX) for name in ("bx", "tx", "ty"))
    statement = body(Threads(block, x, y if down > 1 else integer(0)))
    if down > 1:
        statement = _bound(y, "threadIdx.y", down, statement)
    return _bound(block, "blockIdx.x", blocks, _bound(x, "threadIdx.x", across, statement))


def _bound(var: ir.Var, tag: str, extent: int, body: tirx.Stmt) -> tirx.For:
    index = tirx.IterVar(
        Range(integer(0), integer(extent)), tirx.Var(tag, INDEX), tirx.IterVar.ThreadIndex, tag
    )
    return tirx.For(var, integer(0), integer(extent), tirx.ForKind.THREAD_BINDING, body, index)


def loop(
    extent: int | ir.Expr,
    body: Callable[[ir.Expr], tirx.Stmt],
    kind: tirx.ForKind = tirx.ForKind.SERIAL,
) -> tirx.Stmt:
    """A loop from zero; an extent of one makes none."""
    if extent == 1:
        return body(integer(0))
    var = tirx.Var("i", INDEX)
    return tirx.For(var, integer(0), integer(extent) if isinstance(extent, int) else extent, kind, body(var))


def unrolled(extent: int, body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
    """A loop that TVM unrolls, as arrays in registers need it."""
    return loop(extent, body, tirx.ForKind.UNROLLED)


def unrolled_nest(extents: tuple[int, ...], body: Callable[..., tirx.Stmt]) -> tirx.Stmt:
    """Unrolled loops around `body`, which takes an index of each."""
    if len(extents) == 1:
        return unrolled(extents[0], body)
    return unrolled(extents[0], lambda i: unrolled_nest(extents[1:], lambda *rest: body(i, *rest)))


def vectorized(lanes: int, body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
    """One access of so many neighbouring elements."""
    return loop(lanes, body, tirx.ForKind.VECTORIZED)


def sequence(statements: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """One statement after the other; one alone stays alone."""
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(list(statements))


def when(condition: ir.Expr, body: tirx.Stmt, *, always: bool = False) -> tirx.Stmt:
    """`body` under a condition, which is left out where it is `always` true."""
    return body if always else tirx.IfThenElse(condition, body, None)


def point_of(flat: ir.Expr, extents: Sequence[int]) -> list[ir.Expr]:
    """Row-major indices of a flat position."""
    point: list[ir.Expr] = []
    for axis, extent in enumerate(reversed(extents)):
        first = axis == len(extents) - 1
        point.append(flat if first else tirx.floormod(flat, integer(extent)) if extent > 1 else integer(0))
        flat = tirx.floordiv(flat, integer(extent)) if extent > 1 else flat
    return list(reversed(point))
