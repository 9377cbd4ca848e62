"""State of the layout pass: in which forms, plain (NCHW) or blocked (NCHWc), each tensor exists so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir.expr import GenericConst

from hybridc.passes.program.program import ProgramBuilder, substitute, tensor_dtype, tensor_shape
from hybridc.schedules.blocked_operators import to_blocked, to_plain
from hybridc.targets import Isa

WASTED_LANES = 0.2
"""Fraction of a tensor that may be padding before blocks of half a vector are chosen."""


def lanes_of(channels: int, isa: Isa) -> int:
    """Channels per block: a whole vector, or half of a 512-bit one where whole ones would be too much
    padding."""
    widths = [isa.lanes(), 8]
    fitting = (b for b in widths if -(-channels // b) * b <= channels * (1 + WASTED_LANES))
    return next(fitting, widths[-1])


@dataclass(frozen=True, slots=True)
class Blocked:
    """The blocked form `[N, ceil(channels / lanes), H, W, lanes]` of a tensor `[N, channels, H, W]`."""

    var: relax.Expr
    channels: int

    @property
    def lanes(self) -> int:
        """Channels per block: the lanes of a vector that holds one pixel of a block."""
        return tensor_shape(self.var)[4]

    @property
    def is_filled(self) -> bool:
        """Whether the last block is padded."""
        return self.channels % self.lanes != 0


@dataclass
class Layout:
    """The new program as far as it is written, and the forms there of each tensor of the old one."""

    builder: ProgramBuilder
    isa: Isa
    plain: dict[relax.Expr, relax.Expr]
    blocked: dict[relax.Expr, Blocked] = field(default_factory=dict)
    functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = field(default_factory=dict)
    origins: tuple[str, ...] = ()
    values: dict[relax.Var, Any] = field(default_factory=dict)
    """What the old program's variables are bound to."""
    library: dict[str, tirx.PrimFunc] = field(default_factory=dict)
    """The old program's functions by name."""
    tuples: dict[relax.Var, relax.Var] = field(default_factory=dict)
    """The new program's tuples, some of whose fields are blocked, by the old ones."""
    rewritten: dict[tuple[object, ...], tirx.PrimFunc | None] = field(default_factory=dict)
    """Functions rewritten for blocked operands, by key; None for those that cannot be rewritten."""
    _by_key: dict[tuple[object, ...], tvm.ir.GlobalVar] = field(default_factory=dict)

    def renamed(self, expr: relax.Expr) -> relax.Expr:
        """An expression of the old program with its operands plain."""
        return substitute(expr, self.as_plain)

    def weight(self, expr: relax.Expr) -> np.ndarray | None:
        """The value of an operand of the old program that is known when compiling."""
        if isinstance(expr, GenericConst):
            return expr.value.numpy()
        var = self.plain.get(expr)
        return self.builder.weights.get(var.name) if isinstance(var, relax.Var) else None

    def as_plain(self, var: relax.Var) -> relax.Expr:
        """The tensor in plain layout; converted on first use if only its blocked form exists."""
        if var not in self.plain:
            source = self.blocked[var]
            n, _, h, w, _ = tensor_shape(source.var)
            shape = (n, source.channels, h, w)
            if h * w == 1 and not source.is_filled:
                self.plain[var] = self.emit(relax.op.reshape(source.var, shape), "view")
            else:
                made = tensor_shape(source.var), source.channels, tensor_dtype(source.var)
                result = relax.TensorType(shape, tensor_dtype(source.var))
                self.plain[var] = self.call(
                    ("to_plain", *made), lambda: to_plain(*made), [source.var], result
                )
        return self.plain[var]

    def as_blocked(self, var: relax.Expr, lanes: int) -> Blocked:
        """The tensor in blocks of `lanes` channels; converted on first use if that form does not exist."""
        found = self.blocked.get(var)
        if found is None or found.lanes != lanes:
            plain = self.as_plain(var)
            n, channels, h, w = tensor_shape(plain)
            dtype = tensor_dtype(plain)
            made = (n, channels, h, w), lanes, dtype
            result = relax.TensorType((n, -(-channels // lanes), h, w, lanes), dtype)
            converted = self.call(("to_blocked", *made), lambda: to_blocked(*made), [plain], result)
            found = Blocked(converted, channels)
            self.blocked[var] = found
        return found

    def emit(self, expr: relax.Expr, hint: str) -> relax.Var:
        """Bind an expression, with the origins of the current binding, to a new variable."""
        return self.builder.emit(expr, self.origins, hint)

    def call(
        self,
        key: tuple[object, ...],
        make: Callable[[], tirx.PrimFunc],
        arguments: Sequence[relax.Expr],
        result: Sequence[int] | relax.TensorType | list[relax.TensorType],
    ) -> relax.Var:
        """Call a function, made once for each key, whose first part is its name.

        The result is float32 of a shape, or of the given type, or a tuple of several types.
        """
        if key not in self._by_key:
            number = len(self._by_key)
            while f"{key[0]}_{number}" in self.library:
                number += 1
            variable = tvm.ir.GlobalVar(f"{key[0]}_{number}")
            function = make().with_attr("global_symbol", variable.name_hint)
            relax.expr._update_type(variable, function.ty)
            self._by_key[key] = variable
            self.functions[variable] = self.library[variable.name_hint] = function
        if not isinstance(result, relax.TensorType) and not isinstance(result[0], relax.TensorType):
            result = relax.TensorType(list(result), "float32")
        return self.emit(relax.call_tir(self._by_key[key], list(arguments), result), str(key[0]))
