"""A network of 16-bit floats as a network of float32, and which of its tensors have 16 bits in memory.

All arithmetic is float32, as ONNX Runtime's is: sums of 4,096 products made in float16 are 11 % of scale off.
Every pass and rule then sees an ordinary network; behind `fuse`, the stage `precision` gives tensors between
kernels their 16 bits back (`narrow_storage.py`), so that a result is rounded once, where it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tvm import ir, relax, te, tirx
from tvm.ir.expr import GenericConst

from hybridc.appended_rows import appended_rows, is_appended_rows
from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    is_op,
    tensor_dtype,
    tensor_shape,
    variables,
)
from hybridc.placeholders import is_placeholder, placeholder
from hybridc.schedules.shapes import index_shape
from hybridc.schedules.storage import NARROW, WIDE

_OPAQUE = ("call_tir", "memory.view")
"""What reads bits, or functions with types of their own, but rows that are appended to caches: operands keep
their type."""


@dataclass(frozen=True, slots=True)
class NarrowTensors:
    """The types of what the model has in 16-bit floats, of a float32 program."""

    inputs: Mapping[str, str] = field(default_factory=dict)
    """By name."""
    outputs: Mapping[int, str] = field(default_factory=dict)
    """By position."""
    nodes: Mapping[str, str] = field(default_factory=dict)
    """Of results, by ONNX node."""

    integers: frozenset[str] = frozenset()
    """Inputs by name, caches that are to be rows of integers."""

    def joined(self, other: NarrowTensors) -> NarrowTensors:
        """With those of another one, whose inputs and outputs of type `WIDE` are so after all."""
        inputs, outputs = {**self.inputs, **other.inputs}, {**self.outputs, **other.outputs}
        return NarrowTensors(
            {name: dtype for name, dtype in inputs.items() if dtype != WIDE},
            {position: dtype for position, dtype in outputs.items() if dtype != WIDE},
            {**self.nodes, **other.nodes},
            self.integers | other.integers,
        )

    def in_parts(self, inputs: Mapping[str, Sequence[str]], outputs: Mapping[int, int]) -> NarrowTensors:
        """Of the program in which these inputs are several, by name, and outputs are others, too."""

        def parts(name: str) -> Sequence[str]:
            return inputs.get(name, (name,))

        return NarrowTensors(
            {part: dtype for name, dtype in self.inputs.items() for part in parts(name)},
            {**self.outputs, **{n: self.outputs[old] for old, n in outputs.items() if old in self.outputs}},
            self.nodes,
            frozenset(part for name in self.integers for part in parts(name)),
        )

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs or self.nodes)


def in_float32(program: Program) -> tuple[Program, NarrowTensors]:
    """The program with float32 in the place of 16-bit floats.

    Requires: `main` straight-line, as imported.
    Ensures: no tensor has 16 bits, but in front of and behind functions that are called with such. A Cast of
    float32 to 16 bits rounds if another type is computed of it, by a Cast back or a comparison. Else it is a
    result of 16 bits like any other, which is rounded where it is written to memory.
    The program itself if it has no such tensors.
    Raises: nothing of its own.
    """
    variables = [*program.main.params, *(binding.var for binding in program.bindings)]
    if not any(_narrow_type(v.ty) for v in variables):
        return program, NarrowTensors()
    widener = _Widener(program, ProgramBuilder([_wide_var(v) for v in program.inputs]))
    return widener.program(), widener.narrow()


def _narrow_type(ty: relax.Type) -> str:
    """The type of 16-bit floats that a tensor, or some field of a tuple, has; empty if none."""
    if isinstance(ty, relax.TupleType):
        return next(filter(None, map(_narrow_type, ty.fields)), "")
    dtype = str(getattr(ty.dtype, "dtype", ty.dtype)) if isinstance(ty, relax.TensorType) else ""
    return dtype if dtype in NARROW else ""


def _read_as_another_type(program: Program) -> frozenset[relax.Var]:
    """The variables of which something computes another type than theirs, perhaps after moving their data."""
    found = set[relax.Var]()
    for binding in reversed(program.bindings):
        value = binding.value
        is_moved = not isinstance(value, relax.Call) or has_fact(value, Fact.VIEW | Fact.MOVEMENT)
        for var in variables(value):
            if _narrow_type(var.ty) != _narrow_type(binding.var.ty) or (is_moved and binding.var in found):
                found.add(var)
    return frozenset(found)


def _wide_var(var: relax.Var) -> relax.Var:
    return relax.Var(var.name, relax.TensorType(var.ty.shape, WIDE)) if _narrow_type(var.ty) else var


@dataclass
class _Widener:
    """Writes a program anew, binding by binding."""

    old: Program
    builder: ProgramBuilder
    new: dict[relax.Var, relax.Expr] = field(default_factory=dict)
    functions: dict[ir.GlobalVar, ir.GlobalVar] = field(default_factory=dict)
    """Those that append rows, of float32, by the old ones, whose names they have."""
    made: dict[ir.GlobalVar, tirx.PrimFunc] = field(default_factory=dict)
    type_of: dict[str, str] = field(default_factory=dict)
    """Of the last tensor that a node computes, if that has 16 bits, else empty."""
    rounded: frozenset[relax.Var] = field(init=False)
    """Of which another type is computed, so that a Cast to theirs rounds."""

    def __post_init__(self) -> None:
        values = {b.var: b.value for b in self.old.bindings}
        self.seen_as_outputs = set[relax.Var]()
        self.rounded = _read_as_another_type(self.old)
        todo = [v for output in self.old.outputs for v in variables(output)]
        while todo:
            var = todo.pop()
            value = values.get(var)
            self.seen_as_outputs.add(var)
            if value is not None and (not isinstance(value, relax.Call) or has_fact(value, Fact.VIEW)):
                todo += variables(value)

    def program(self) -> Program:
        old, builder = self.old, self.builder
        self.new.update(zip(old.inputs, builder.inputs, strict=True))
        for var in old.main.params:
            if var.name in old.weights:
                value = old.weights[var.name]
                self.new[var] = builder.weight(_widened(value), var.name)
        for binding in old.bindings:
            self.new[binding.var] = self.value(binding)
            for node in old.origins.get(binding.var.name, ())[-1:]:
                self.type_of[node] = _narrow_type(binding.var.ty)
        outputs = [self.expression(output) for output in old.outputs]
        kept = {name: f for name, f in old.functions.items() if name not in self.functions}
        return builder.finish(outputs, {**kept, **self.made})

    def narrow(self) -> NarrowTensors:
        """Of the program that was written."""
        return NarrowTensors(
            {v.name: dtype for v in self.old.inputs if (dtype := _narrow_type(v.ty))},
            {i: dtype for i, output in enumerate(self.old.outputs) if (dtype := _narrow_type(output.ty))},
            {node: dtype for node, dtype in self.type_of.items() if dtype},
        )

    def expression(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Var):
            return self.new.get(expr, expr)
        if isinstance(expr, GenericConst) and _narrow_type(expr.ty):
            return relax.const(_widened(expr.value.numpy()))
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self.expression(item) for item in expr.fields])
        return expr

    def value(self, binding: relax.VarBinding) -> relax.Expr:
        """What stands for a variable: usually a new variable of float32."""
        call = binding.value
        origins, name = self.old.origins.get(binding.var.name, ()), binding.var.name

        def emit(expr: relax.Expr) -> relax.Var:
            return self.builder.emit(expr, origins, name)

        if isinstance(call, relax.TupleGetItem):
            source = self.expression(call.tuple_value)
            return source.fields[call.index] if isinstance(source, relax.Tuple) else emit(
                relax.TupleGetItem(source, call.index))  # fmt: skip
        if not isinstance(call, relax.Call):
            return self.expression(call)
        if is_op(call, "astype"):
            source = self.expression(call.args[0])
            wanted = tensor_dtype(binding.var)
            # an output has bytes of its own where its type is not that of what it is cast from
            is_copied = binding.var in self.seen_as_outputs and tensor_dtype(call.args[0]) != wanted
            if wanted in (tensor_dtype(source), tensor_dtype(call.args[0])) and not is_copied:
                return source
            if wanted in NARROW and tensor_dtype(source) == WIDE and binding.var not in self.rounded:
                return emit(relax.op.astype(source, WIDE))  # computes nothing, but its bytes are narrow
            result = emit(relax.op.astype(source, wanted))
            return emit(relax.op.astype(result, WIDE)) if wanted in NARROW else result
        if is_op(call, "call_tir") and is_appended_rows(self.old.module[call.args[0]]):
            return emit(self.appended(call))
        if is_op(call, *_OPAQUE):
            arguments = [self.narrowed(a, emit) for a in call.args]
            return self.widened(emit(relax.Call(call.op, arguments, call.attrs, call.ty_args)), emit)
        arguments = [self.expression(a) for a in call.args]
        wide = relax.Call(call.op, arguments, call.attrs, call.ty_args)
        if str(getattr(wide.attrs, "out_dtype", "")) in NARROW:
            wide = _with_wide_sums(wide)
        return self.widened(emit(wide), emit)

    def appended(self, call: relax.Call) -> relax.Call:
        """Rows that take their places in a cache of float32."""
        arguments = [self.expression(a) for a in call.args[1].fields]
        old = call.args[0]
        if old not in self.functions:
            function = self.old.module[old]
            given = [te.placeholder(index_shape(tensor_shape(a)), tensor_dtype(a)) for a in arguments]
            made = te.create_prim_func([*given, appended_rows(*given)], index_dtype_override="int64")
            for key, value in function.attrs.items():
                made = made.with_attr(key, value)
            self.functions[old] = new = ir.GlobalVar(old.name_hint)
            relax.expr._update_type(new, made.ty)
            self.made[new] = made.with_attr("global_symbol", old.name_hint)
        result = relax.TensorType(tensor_shape(arguments[0]), WIDE)
        return relax.call_tir(self.functions[old], arguments, result)

    def narrowed(self, old: relax.Expr, emit: Callable[[relax.Expr], relax.Var]) -> relax.Expr:
        """An operand in the type that it has in the old program."""
        if isinstance(old, relax.Tuple):
            return relax.Tuple([self.narrowed(item, emit) for item in old.fields])
        new = self.expression(old)
        dtype = _narrow_type(old.ty) if isinstance(old, relax.Var | GenericConst) else ""
        return emit(relax.op.astype(new, dtype)) if dtype else new

    def widened(self, result: relax.Var, emit: Callable[[relax.Expr], relax.Var]) -> relax.Expr:
        """A result as float32, field by field."""
        if not _narrow_type(result.ty):
            return result
        if isinstance(result.ty, relax.TupleType):
            fields = [emit(relax.TupleGetItem(result, i)) for i in range(len(result.ty.fields))]
            return relax.Tuple([self.widened(f, emit) for f in fields])
        return emit(relax.op.astype(result, WIDE))


def _widened(value: np.ndarray) -> np.ndarray:
    if value.dtype.name not in NARROW:
        return value
    return placeholder(value.shape, np.float32) if is_placeholder(value) else value.astype(np.float32)


def _with_wide_sums(call: relax.Call) -> relax.Call:
    """A product whose attributes name the type of its sums, with float32."""
    if is_op(call, "matmul"):
        return relax.op.matmul(*call.args, out_dtype=WIDE)
    attrs, make = call.attrs, getattr(relax.op.nn, call.op.name.rpartition(".")[2])
    padding = [list(attrs.output_padding)] if hasattr(attrs, "output_padding") else []
    lists = [list(attrs.strides), list(attrs.padding), *padding, list(attrs.dilation), int(attrs.groups)]
    layouts = [str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout)]
    return make(*call.args, *lists, *layouts, WIDE)
