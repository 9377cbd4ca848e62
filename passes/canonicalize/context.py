"""The interface of the rewrites of `canonicalize`: what they may ask and emit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir.expr import GenericConst

from hybridc.passes.program.program import ProgramBuilder, tensor_shape


@dataclass
class Context:
    """State of the rewriting of one binding after the other; variables are those of the new function."""

    builder: ProgramBuilder
    values: dict[relax.Var, relax.Expr]
    uses: Counter[relax.Var]
    """Reads of each variable of the new function, counted on the old one."""
    origins: tuple[str, ...] = ()
    name: str = ""
    """Origins and name of the binding that is rewritten."""
    functions: dict[tuple[object, ...], tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = field(default_factory=dict)
    """PrimFuncs that rules call, by what they compute."""

    def weight(self, expr: relax.Expr) -> np.ndarray | None:
        """The value of an expression known at compile time."""
        if isinstance(expr, GenericConst):
            return expr.value.numpy()
        return self.builder.weights.get(expr.name) if isinstance(expr, relax.Var) else None

    def definition(self, expr: relax.Expr) -> Any:
        """What a variable was bound to; None for parameters."""
        return self.values.get(expr) if isinstance(expr, relax.Var) else None

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind an expression to a new variable, with the origins and the name of the current binding."""
        var = self.builder.emit(expr, self.origins, self.name)
        self.values[var] = expr
        return var

    def call(
        self,
        key: tuple[object, ...],
        make: Callable[[], tirx.PrimFunc],
        arguments: list[relax.Expr],
        shape: tuple[int, ...] | None = None,
        dtype: str = "float32",
    ) -> relax.Call:
        """Call a function, made once for each key.

        The result is shaped like the first argument if no `shape` is given.
        """
        if key not in self.functions:
            name = tvm.ir.GlobalVar(f"{key[0]}_{len(self.functions)}")
            function = make().with_attr("global_symbol", name.name_hint)
            relax.expr._update_type(name, function.ty)
            self.functions[key] = name, function
        result = relax.TensorType(shape or tensor_shape(arguments[0]), dtype)
        return relax.call_tir(self.functions[key][0], arguments, result)


Rule = Callable[[relax.Expr, Context], relax.Expr | None]
"""Replaces an expression by an equal one; returns None for "not mine"."""


def result_shape(call: relax.Call) -> tuple[int, ...]:
    """Of a call that is not bound yet."""
    return tensor_shape(relax.BlockBuilder().normalize(call))
