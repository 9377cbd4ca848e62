"""The registry of gradient rules, and what a rule may ask and do.

A rule gets the call of an operator as it was emitted forward, its result y and the gradient dy of the loss
with respect to y; it emits the gradients with respect to the call's arguments. What a rule reads of arguments
and result stays in memory from the forward to the backward pass, so it should read as little as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.ir.expr import GenericConst

from hybridc.passes.program.program import (
    ProgramBuilder,
    is_op,
    operator_name,
    tensor_dtype,
    tensor_shape,
    variables,
)

Product: TypeAlias = "tuple[relax.Expr, relax.Expr]"
"""Of a transposed first matrix with a second one."""
Gradient: TypeAlias = "relax.Expr | list[relax.Expr | None] | None"
"""Of a tensor; of a tuple, one for each field; None where there is none."""


@dataclass
class Emitter:
    """Writes bindings into the program that is made, and the functions that they call."""

    builder: ProgramBuilder
    functions: dict[tuple[object, ...], tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = field(default_factory=dict)
    """PrimFuncs that rules call, by what they compute."""
    keys: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Of the functions made here, by name."""
    origins: tuple[str, ...] = ()
    name: str = ""
    """Hint for the names of variables where none is given."""
    library: dict[str, tirx.PrimFunc] = field(default_factory=dict)
    """All functions by name: the program's own, and those made here."""
    values: dict[relax.Var, relax.Expr] = field(default_factory=dict)
    """What each emitted variable was bound to."""

    @cached_property
    def inputs(self) -> dict[str, relax.Var]:
        """Of the program, by name."""
        return {v.name: v for v in self.builder.inputs}

    def emit(self, expr: relax.Expr, hint: str = "") -> relax.Var:
        """Bind an expression of variables to a new variable; nested calls are bound first."""
        flat = self._flat(expr)
        var = self.builder.emit(flat, self.origins, hint or self.name)
        self.values[var] = flat
        return var

    def _flat(self, expr: relax.Expr) -> relax.Expr:
        if not isinstance(expr, relax.Call) or is_op(expr, "call_tir"):
            return expr
        return relax.Call(expr.op, [self._bound(a) for a in expr.args], expr.attrs, expr.ty_args)

    def _bound(self, argument: relax.Expr) -> relax.Expr:
        if isinstance(argument, relax.Tuple):
            return relax.Tuple([self._bound(item) for item in argument.fields])
        return self.emit(argument) if isinstance(argument, relax.Call) else argument

    def call(
        self,
        key: tuple[object, ...],
        make: Callable[[], tirx.PrimFunc],
        arguments: Sequence[relax.Expr],
        results: relax.TensorType | list[relax.TensorType],
        hint: str = "",
    ) -> relax.Var:
        """Call a PrimFunc, made once for each key, whose first element is the function's name.

        A list of result types makes a tuple. The key must determine all that `make` depends on but the types
        of the arguments, which belong to it.
        """
        key = (*key, *((tensor_shape(a), tensor_dtype(a)) for a in arguments))
        if key not in self.functions:
            name = tvm.ir.GlobalVar(self._function_name(str(key[0])))
            function = make().with_attrs({"global_symbol": name.name_hint, "tirx.noalias": True})
            relax.expr._update_type(name, function.ty)
            self.functions[key] = name, function
            self.library[name.name_hint] = function
            self.keys[name.name_hint] = key
        return self.emit(
            relax.call_tir(self.functions[key][0], list(arguments), results), hint or str(key[0])
        )

    def _function_name(self, stem: str) -> str:
        name, number = stem, 0
        while name in self.library:
            number += 1
            name = f"{stem}_{number}"
        return name

    def parameters(self, call: relax.Call) -> tuple[Any, ...]:
        """What a function was made from here: its key without the name and the types."""
        key = self.keys[call.args[0].name_hint]
        return key[1 : len(key) - len(operands(call))]

    def attribute(self, call: relax.Call, name: str) -> Any:
        """An attribute of the function that a `call_tir` calls."""
        return self.library[call.args[0].name_hint].attrs[name]

    def elementwise(self, name: str, body: Callable[..., tirx.Expr], *arguments: relax.Expr) -> relax.Var:
        """`body` of each element of tensors of one shape; `name` must determine all that `body` depends on.

        One function instead of a chain of operators. The result is of the first argument's type.
        """
        first = arguments[0]

        def make() -> tirx.PrimFunc:
            inputs = [placeholder(a, f"x{i}") for i, a in enumerate(arguments)]
            out = te.compute(inputs[0].shape, lambda *at: body(*(x[at] for x in inputs)), name=stem)
            return te.create_prim_func([*inputs, out])

        stem, _, _ = name.partition(":")
        result = relax.TensorType(tensor_shape(first), tensor_dtype(first))
        return self.call((stem, name), make, arguments, result)

    def typed(self, expr: relax.Expr) -> relax.Expr:
        """An expression with its type inferred, not emitted."""
        return self.builder._normalizer.normalize(expr)

    def permuted(self, expr: relax.Expr, axes: Sequence[int]) -> relax.Expr:
        """A transpose; of a transpose, the one that does both."""
        before = self.values.get(expr) if isinstance(expr, relax.Var) else None
        if before is not None and is_op(before, "permute_dims"):
            order = permutation(before)
            axes, expr = [order[axis] for axis in axes], before.args[0]
        return expr if list(axes) == sorted(axes) else self.emit(relax.op.permute_dims(expr, list(axes)))

    def shaped(self, expr: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """A view of another shape."""
        same = tensor_shape(expr) == tuple(shape)
        return expr if same else self.emit(relax.op.reshape(expr, list(shape)))

    def item(self, result: relax.Var, index: int) -> relax.Var:
        """One field of a tuple."""
        return self.emit(relax.TupleGetItem(result, index), f"{result.name}_{index}")

    def known(self, expr: relax.Expr) -> np.ndarray | None:
        """The value of a constant or weight."""
        if isinstance(expr, GenericConst):
            return expr.value.numpy()
        return self.builder.weights.get(expr.name) if isinstance(expr, relax.Var) else None


@dataclass(frozen=True, slots=True)
class Recorded:
    """A binding of the forward pass that a gradient goes through."""

    var: relax.Var
    value: relax.Call | relax.TupleGetItem
    origins: tuple[str, ...]


@dataclass
class Reverse(Emitter):
    """What a gradient rule may ask and emit."""

    active: set[relax.Var] = field(default_factory=set)
    """Variables that depend on a parameter."""
    tape: list[Recorded] | None = field(default_factory=list)
    """What is emitted is recorded here, in order; None: it is the backward pass."""
    seed: relax.Var | None = None
    """Input that random numbers are drawn from."""
    draws: int = 0
    """Random tensors emitted so far."""
    shared_matrices: frozenset[relax.Var] = frozenset()
    """Those whose gradients are left as `products` until all of them are there."""
    products: dict[relax.Var, list[Product]] = field(default_factory=dict)
    """By the matrix whose gradient has their sum: what is not emitted yet."""
    norm_parts: int = 1
    """Parts of a batch, each on a rank of its own, whose statistics BatchNorm takes together."""
    examples: relax.Var | None = None
    """How many of a batch there are, int64[1]: the others are padding; None if it is always whole."""

    def emit(self, expr: relax.Expr, hint: str = "") -> relax.Var:
        """As `Emitter.emit`; in the forward pass, what depends on a parameter is recorded."""
        var = super().emit(expr, hint)
        if self.tape is not None and self._depends(var):
            self.active.add(var)
            self.tape.append(Recorded(var, self.values[var], self.origins))
        return var

    def _depends(self, var: relax.Var) -> bool:
        """Only floating point numbers have gradients; a tuple is judged by its fields."""
        numeric = not isinstance(var.ty, relax.TensorType) or is_floating(var)
        return numeric and any(v in self.active for v in variables(self.values[var]))

    def wanted(self, argument: relax.Expr) -> bool:
        """Whether the gradient of an argument leads to a parameter: else it need not be computed."""
        if isinstance(argument, relax.Tuple):
            return any(self.wanted(item) for item in argument.fields)
        return isinstance(argument, relax.Var) and argument in self.active


Rule = Callable[[Reverse, relax.Call, relax.Var, Any], Sequence[Gradient] | None]
"""(reverse, call, result y, its gradient dy) -> a gradient for each argument, which may be left to emit; None
for a use of the operator that no gradient is written for.

Where y is a tuple, dy is a list with a gradient, or None, for each field. For a `call_tir` the arguments are
those of the called function.
"""
Form = Callable[[Reverse, relax.Call], "relax.Expr | None"]
"""(reverse, call) -> what to compute in training instead of an operator; None: the operator itself."""

GRADIENTS: dict[str, Rule] = {}
"""By operator, without `relax.`, or by the name of the function that is called."""
FORMS: dict[str, Form] = {}


def gradient(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for these operators and functions."""

    def register(rule: Rule) -> Rule:
        for name in names:
            assert name not in GRADIENTS, f"two rules for {name}"
            GRADIENTS[name] = rule
        return rule

    return register


def training_form(*names: str) -> Callable[[Form], Form]:
    """Register how these operators are computed where they will be differentiated."""

    def register(form: Form) -> Form:
        FORMS.update(dict.fromkeys(names, form))
        return form

    return register


def rule_name(call: relax.Call) -> str:
    """The name a rule of this call is registered by."""
    return operator_name(call) if is_op(call, "call_tir") else call.op.name.removeprefix("relax.")


def operands(call: relax.Call) -> list[relax.Expr]:
    """Operands of a call; for `call_tir` the arguments of the function."""
    return list(call.args[1].fields) if is_op(call, "call_tir") else list(call.args)


def permutation(call: relax.Call) -> list[int]:
    """The axes of a `permute_dims`."""
    rank, axes = len(tensor_shape(call.args[0])), call.attrs.axes
    return list(range(rank))[::-1] if axes is None else [int(axis) % rank for axis in axes]


def placeholder(like: relax.Expr, name: str) -> te.Tensor:
    """A TE tensor of an expression's type, with 64-bit extents as everywhere in Relax."""
    return te.placeholder(extents(tensor_shape(like)), tensor_dtype(like), name)


def extents(shape: Sequence[int]) -> list[tirx.IntImm]:
    """A shape for TE, with 64-bit indices."""
    return [tirx.IntImm("int64", extent) for extent in shape]


def known_scalar(reverse: Emitter, expr: relax.Expr) -> float | None:
    """The value of a scalar that is known at compile time."""
    value = reverse.known(expr)
    return float(value.reshape(())) if value is not None and value.size == 1 else None


def scaled(reverse: Emitter, expr: relax.Expr, factor: float) -> relax.Expr:
    """A tensor times a number, computed now where both are known."""
    value = reverse.known(expr) if isinstance(expr, GenericConst) else None
    if value is not None:
        return relax.const(value * value.dtype.type(factor), value.dtype.name)
    return expr if factor == 1 else reverse.emit(relax.op.multiply(expr, constant(factor, expr)))


def constant(value: float, like: relax.Expr) -> GenericConst:
    """A scalar of an expression's dtype."""
    return relax.const(value, tensor_dtype(like))


def is_floating(expr: relax.Expr) -> bool:
    """Whether there can be a gradient with respect to a tensor."""
    return isinstance(expr.ty, relax.TensorType) and tensor_dtype(expr).startswith(("float", "bfloat"))
