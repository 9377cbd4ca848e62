"""Places that checks may be put into, and which of them fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tvm_ffi
from tvm import ir, tirx

from hybridc.schedules.safety.statements import sequence

SURVEYED_POSITIONS = 1 << 12
"""As many, of 64 bits, are no more than a first-level cache holds."""


@dataclass
class Scope:
    """A place that checks may be put into: before the statement, or the loop's body, that it stands for."""

    defined: set[ir.Var] = field(default_factory=set)
    """Variables that are known from here on."""
    condition: set[ir.Var] = field(default_factory=set)
    """Variables of a condition that holds here and not outside."""
    binds_threads: bool = False
    """Outside of it there is no GPU."""
    loop: tirx.For | None = None
    """The loop whose body it is."""
    at_once: bool = False
    """The loop is one of vectors, or an innermost one that LLVM may make one."""
    is_task: bool = False
    """All of it runs on one thread, and more than that does not."""
    worst: dict[tuple[int, int], ir.Var] = field(default_factory=dict)
    """Of a task: by number and lanes of a check, where the worst of its values are kept."""
    checks: list[tirx.Stmt] = field(default_factory=list)
    after: list[tirx.Stmt] = field(default_factory=list)
    """What comes behind the body."""
    made: list[tuple[ir.Expr, int, ir.Expr]] = field(default_factory=list)
    """Value, number and result of the checks here."""

    def named(self, name: str, value: ir.Expr) -> ir.Expr:
        """A name that has a value from here on; the value itself in vectors, which TVM gives no names."""
        if self.loop is not None and self.loop.kind == tirx.ForKind.VECTORIZED:
            return value
        var = tirx.Var(name, str(value.ty.dtype))
        self.checks.append(tirx.Bind(var, value))
        self.defined.add(var)
        return var


@dataclass(frozen=True, slots=True)
class Survey:
    """All values of an expression, at a place outside of the loops that it depends on and of others."""

    place: Scope
    loops: tuple[tirx.For, ...]
    """Those that the expression depends on, outermost first, of constant bounds."""

    @property
    def extents(self) -> tuple[int, ...]:
        """How often each of the loops runs."""
        return tuple(int(loop.extent) for loop in self.loops)

    @property
    def indices(self) -> list[ir.Expr]:
        """Which of the values it is, inside of the loops."""
        return [loop.loop_var - loop.min for loop in self.loops]

    def over(self, value: ir.Expr, body: Callable[[list[ir.Expr], ir.Expr], tirx.Stmt]) -> tirx.Stmt:
        """Loops of their own over what `body` makes of the indices and of the value, which has a name."""
        names = {loop.loop_var: tirx.Var("at", str(loop.loop_var.ty.dtype)) for loop in self.loops}

        def own(var: ir.Var) -> ir.Var:
            return names.get(var, var)

        fed = tirx.Var("fed", str(value.ty.dtype))
        at = [names[loop.loop_var] - loop.min for loop in self.loops]
        made = sequence([tirx.Bind(fed, tvm_ffi.structural_map(value, (ir.Var, own))), body(at, fed)])
        for loop in reversed(self.loops):
            made = tirx.For(names[loop.loop_var], loop.min, loop.extent, tirx.ForKind.SERIAL, made)
        return made


def survey_of(scopes: Sequence[Scope], needed: set[ir.Var]) -> Survey | None:
    """The survey that spares repeating most: outside of the outermost loop of a task, but inside of all
    conditions, that the variables `needed` do not depend on. None if nothing is repeated, on a GPU, and if
    there are more values than a cache holds.

    `scopes` are those around the expression, outermost first.
    """
    if any(scope.binds_threads for scope in scopes):
        return None
    found: Survey | None = None
    loops: tuple[tirx.For, ...] = ()
    for outside, scope in reversed(list(itertools.pairwise(scopes))):
        loop = scope.loop
        known = scope.defined if loop is None else scope.defined - {loop.loop_var}
        if scope.is_task or scope.condition or needed & known:
            break
        if loop is None:
            continue
        # a loop that may run zero times looks at nothing
        if loop.step is not None or not all(isinstance(n, tirx.IntImm) for n in (loop.min, loop.extent)):
            break
        if loop.loop_var in needed:
            loops = (loop, *loops)
        elif loops and int(loop.extent) > 1:
            found = Survey(outside, loops)
        if math.prod(int(each.extent) for each in loops) > SURVEYED_POSITIONS:
            break
    return found
