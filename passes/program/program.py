"""The model between two Relax passes: a straight-line function, its weights, the origin of each line."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import tvm
from tvm import relax, tirx
from tvm_ffi import structural_equal


@dataclass(frozen=True, slots=True)
class Program:
    """One Relax function `main` and what it needs.

    `main` is a single block of bindings without control flow. Its parameters are the inputs and then
    the weights, whose values are in `weights` by parameter name; it returns a tuple of variables.
    `module` also holds the functions that it calls.
    """

    module: tvm.IRModule
    weights: Mapping[str, np.ndarray]
    origins: Mapping[str, tuple[str, ...]]
    """Names of the ONNX nodes that each binding, by variable name, computes."""

    @property
    def main(self) -> relax.Function:
        """The network."""
        return self.module["main"]

    @property
    def inputs(self) -> list[relax.Var]:
        """Parameters of `main` that are not weights."""
        return [v for v in self.main.params if v.name not in self.weights]

    @property
    def functions(self) -> dict[tvm.ir.GlobalVar, tirx.PrimFunc]:
        """PrimFuncs that `main` calls by `call_tir`."""
        return {g: f for g, f in self.module.functions.items() if isinstance(f, tirx.PrimFunc)}

    @property
    def bindings(self) -> list[relax.VarBinding]:
        """Of `main`, in order."""
        return [binding for block in self.main.body.blocks for binding in block.bindings]

    @property
    def outputs(self) -> list[relax.Expr]:
        """What `main` returns, field by field."""
        body = resolve(self.main.body.body, {b.var: b.value for b in self.bindings})
        return list(body.fields) if isinstance(body, relax.Tuple) else [self.main.body.body]


def is_same(a: Program, b: Program) -> bool:
    """Whether two programs of one model compute the same in the same way; weights are known by name."""
    return a.weights.keys() == b.weights.keys() and bool(structural_equal(a.module, b.module))


def resolve(expr: relax.Expr, values: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """Follow variables that only name another variable or a tuple."""
    while isinstance(expr, relax.Var) and isinstance(values.get(expr), relax.Var | relax.Tuple):
        expr = values[expr]
    return expr


def is_op(expr: relax.Expr, *names: str) -> bool:
    """Whether `expr` calls one of these operators, named without the `relax.` prefix."""
    return (
        isinstance(expr, relax.Call)
        and isinstance(expr.op, tvm.ir.Op)
        and expr.op.name.removeprefix("relax.") in names
    )


def called_function(binding: relax.VarBinding) -> str:
    """The name of the function that a binding calls; empty if it calls none."""
    return function_of_call(binding.value)


def function_of_call(value: relax.Expr | None) -> str:
    """The name of the function that a value is a call of; empty if it is none."""
    return str(value.args[0].name_hint) if value is not None and is_op(value, "call_tir") else ""


Tensor = tuple[relax.Var, int]
"""A variable, and the position of a field if it is a tuple, else 0."""


def tensor_of(var: relax.Var, values: Mapping[relax.Var, relax.Expr]) -> Tensor:
    """The tensor whose bytes a variable names: a reshape or a projection names those of its operand.

    `values` are those of the bindings of a fused program, by their variables.
    """
    index = 0
    while (value := values.get(var)) is not None and not is_op(value, "call_tir"):
        if isinstance(value, relax.TupleGetItem):
            var, index = value.tuple_value, value.index
        else:
            var = value.args[0]
    return var, index


def operator_name(call: relax.Call) -> str:
    """The operator that a call applies, without namespace; the function's, unnumbered, where it calls one."""
    if is_op(call, "call_tir"):
        return re.sub(r"_\d+$", "", call.args[0].name_hint)
    return call.op.name.rpartition(".")[2]


def variables(expr: relax.Expr) -> list[relax.Var]:
    """The variables that a normalised expression reads, in order, with repeats."""
    if isinstance(expr, relax.Var):
        return [expr]
    if isinstance(expr, relax.Tuple):
        return [v for item in expr.fields for v in variables(item)]
    if isinstance(expr, relax.TupleGetItem):
        return variables(expr.tuple_value)
    if isinstance(expr, relax.Call):
        return [v for argument in expr.args for v in variables(argument)]
    return []


def substitute(expr: relax.Expr, operand: Callable[[relax.Var], relax.Expr]) -> relax.Expr:
    """A normalised expression with every variable that it reads replaced by `operand` of it."""
    if isinstance(expr, relax.Var):
        return operand(expr)
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([substitute(item, operand) for item in expr.fields])
    if isinstance(expr, relax.TupleGetItem):
        return relax.TupleGetItem(substitute(expr.tuple_value, operand), expr.index)
    if isinstance(expr, relax.Call):
        arguments = [substitute(a, operand) for a in expr.args]
        return relax.Call(expr.op, arguments, expr.attrs, expr.ty_args)
    return expr


def content_number(content: bytes) -> int:
    """A hash, for names by content: equal for equal bytes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest())


def constant_name(value: np.ndarray) -> str:
    """Equal constants have one name."""
    return f"constant_{content_number(f'{value.dtype}{value.shape}'.encode() + value.tobytes())}"


def part_name(whole: relax.Var | relax.Constant, axis: int, begin: int, end: int) -> str:
    """The name of a weight's slice from `begin` to `end`; tilings of a network share slices by it."""
    name = whole.name if isinstance(whole, relax.Var) else constant_name(whole.value.numpy())
    return f"{name}.{axis}_{begin}_{end}"


def weight_part(whole: np.ndarray, axis: int, begin: int, end: int) -> np.ndarray:
    """A view: a network is cut up in several ways, each of which would else hold a copy of its weights."""
    return whole[(slice(None),) * axis + (slice(begin, end),)]


def count_uses(program: Program) -> Counter[relax.Var]:
    """How often each variable is read; being an output of the model counts as a read."""
    uses: Counter[relax.Var] = Counter()
    for binding in program.bindings:
        uses.update(variables(binding.value))
    for output in program.outputs:
        uses.update(variables(output))
    return uses


def without_uncalled(program: Program) -> Program:
    """Drop functions that `main` does not call."""
    called = {b.value.args[0].name_hint for b in program.bindings if is_op(b.value, "call_tir")}
    kept = {g: f for g, f in program.module.functions.items() if g.name_hint in {"main", *called}}
    return replace(program, module=tvm.IRModule(kept))


def tensor_shape(expr: relax.Expr) -> tuple[int, ...]:
    """The static shape of a tensor expression."""
    return tuple(int(extent) for extent in expr.ty.shape.values)


def tensor_dtype(expr: relax.Expr) -> str:
    """The dtype name of a tensor expression."""
    dtype = expr.ty.dtype
    return str(getattr(dtype, "dtype", dtype))


@dataclass
class ProgramBuilder:
    """Writes a new `main` binding by binding, with the types inferred and the origins kept."""

    inputs: list[relax.Var]
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _weight_vars: dict[str, relax.Var] = field(default_factory=dict)
    _bindings: list[relax.VarBinding] = field(default_factory=list)
    _names: Counter[str] = field(default_factory=Counter)
    _normalizer: relax.BlockBuilder = field(default_factory=relax.BlockBuilder)

    def __post_init__(self) -> None:
        self._names.update(v.name for v in self.inputs)

    def unique(self, hint: str) -> str:
        """A name not used so far in this function."""
        name = hint
        while self._names[name]:
            name = f"{hint}_{self._names[hint]}"
            self._names[hint] += 1
        self._names[name] += 1
        return name

    def emit(self, expr: relax.Expr, origins: Iterable[str], hint: str) -> relax.Var:
        """Bind `expr` to a new variable."""
        expr = self._normalizer.normalize(expr)
        var = relax.Var(self.unique(hint), expr.ty)
        self._bindings.append(relax.VarBinding(var, expr))
        self.origins[var.name] = tuple(dict.fromkeys(origins))
        return var

    def weight(self, value: np.ndarray, hint: str) -> relax.Var:
        """A new weight parameter with this value."""
        var = relax.Var(self.unique(hint), relax.TensorType(value.shape, value.dtype.name))
        self.weights[var.name] = value
        self._weight_vars[var.name] = var
        return var

    def take_parameters(self, program: Program) -> dict[relax.Var, relax.Expr]:
        """The parameter here for each parameter of `program`: inputs are shared, weights become new ones."""
        weights = {v: program.weights.get(v.name) for v in program.main.params}
        return {v: v if w is None else self.weight(w, v.name) for v, w in weights.items()}

    def finish(
        self, outputs: list[relax.Expr], functions: Mapping[tvm.ir.GlobalVar, object] | None = None
    ) -> Program:
        """Drop what no output needs and close the function."""
        live = {v for output in outputs for v in variables(output)}
        kept: list[relax.VarBinding] = []
        for binding in reversed(self._bindings):
            if binding.var in live:
                kept.append(binding)
                live.update(variables(binding.value))
        kept.reverse()
        weights = [var for var in self._weight_vars.values() if var in live]
        result = self._normalizer.normalize(relax.Tuple(outputs))
        body = relax.SeqExpr([relax.BindingBlock(kept)], result)
        relax.expr._update_type(body, result.ty)
        main = relax.Function([*self.inputs, *weights], body, result.ty).with_attr("global_symbol", "main")
        name = tvm.ir.GlobalVar("main")
        relax.expr._update_type(name, main.ty)
        module = tvm.IRModule({**(functions or {}), name: main})
        return Program(
            module,
            {var.name: self.weights[var.name] for var in weights},
            {binding.var.name: self.origins[binding.var.name] for binding in kept},
        )


def with_own_names(program: Program, others: Mapping[str, np.ndarray]) -> Program:
    """The program, in which weights that have the name of another one of `others`, but not its values, have
    names that none of these has.

    What is made of weights in a tiled network is numbered anew, and may be of other layers than elsewhere.
    """
    clashing = [name for name, own in program.weights.items() if not _is_same(own, others.get(name, own))]
    if not clashing:
        return program
    taken = {*program.weights, *(v.name for v in program.inputs), *(b.var.name for b in program.bindings)}
    names: dict[str, str] = {}
    for name in clashing:
        own, numbered = program.weights[name], (f"{name}_{i}" for i in count())
        names[name] = next(n for n in numbered if n not in taken and _is_same(own, others.get(n, own)))
        taken.add(names[name])
    builder = ProgramBuilder(program.inputs)
    values: dict[relax.Var, relax.Expr] = {}
    for var in program.main.params:
        own_weight = program.weights.get(var.name)
        name = names.get(var.name, var.name)
        values[var] = var if own_weight is None else builder.weight(own_weight, name)
    for binding in program.bindings:
        value = substitute(binding.value, values.__getitem__)
        values[binding.var] = builder.emit(value, program.origins.get(binding.var.name, ()), binding.var.name)
    outputs = [substitute(output, values.__getitem__) for output in program.outputs]
    return builder.finish(outputs, program.functions)


def _is_same(array: np.ndarray, other: np.ndarray) -> bool:
    if array is other or array.__array_interface__ == other.__array_interface__:
        return True  # without a look at all elements
    return array.dtype == other.dtype and np.array_equal(array, other)
