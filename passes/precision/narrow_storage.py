"""Which tensors between kernels are 16-bit floats in memory, and the functions that read and write them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import numpy as np
import tvm
from tvm import relax, tirx

from hybridc.options import FP16
from hybridc.passes.precision.wide_program import NarrowTensors
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    is_op,
    tensor_shape,
    variables,
)
from hybridc.schedules.rule import PRECISION
from hybridc.schedules.storage import WIDE, stored

HALF = "float16"
Tensor = tuple[relax.Var, int]
"""A variable, and the position of a field if it is a tuple, else 0."""


def store_narrow(program: Program, narrow: NarrowTensors, reduced: Set[str] = frozenset()) -> Program:
    """Store tensors in 16 bits: those that the model has so, and in float16 what `reduced` functions share.

    Requires: `program` fused.
    Ensures: inputs and outputs have the types of the model. A tensor that a function of `reduced` writes is
    float16 if only such functions read it; of weights each function reads its own. Arithmetic stays
    float32. Functions that read or write 16 bits are new ones, whose names tell which of their parameters
    these are.
    Raises: nothing of its own.
    """
    if not narrow and not reduced:
        return program
    return _Writer(program, narrow, reduced).program()


@dataclass
class _Writer:
    old: Program
    model: NarrowTensors
    reduced: Set[str]
    new: dict[relax.Var, relax.Var] = field(default_factory=dict)
    functions: dict[str, tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = field(default_factory=dict)
    weights: dict[tuple[str, str], relax.Var] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls = [b for b in self.old.bindings if is_op(b.value, "call_tir")]
        self.viewed = {b.var: _viewed(b.value) for b in self.old.bindings if not is_op(b.value, "call_tir")}
        self.narrow = self._narrow_tensors()

    # ------------------------------------------------------------------------------------ decisions

    def tensor(self, var: relax.Var) -> Tensor:
        """The tensor whose bytes a variable names: a view names those of its operand."""
        index = 0
        while var in self.viewed:
            var, at = self.viewed[var]
            index = index if at is None else at
        return var, index

    def _narrow_tensors(self) -> dict[Tensor, str]:
        old, model = self.old, self.model
        found = {(v, 0): model.inputs[v.name] for v in old.inputs if v.name in model.inputs}
        read_in_full: set[Tensor] = {self.tensor(output) for output in old.outputs}
        for call in self.calls:
            if _name(call) not in self.reduced:
                read_in_full |= {
                    self.tensor(v) for v in call.value.args[1].fields if isinstance(v, relax.Var)
                }
        for call in self.calls:
            dtype = model.nodes.get(old.origins[call.var.name][-1], "")
            for i, ty in enumerate(_fields(call.var.ty)):
                tensor = (call.var, i)
                if _name(call) in self.reduced and tensor not in read_in_full:
                    dtype = dtype or HALF
                if _dtype(ty) == WIDE and dtype:
                    found[tensor] = dtype
        outputs = {self.tensor(output): model.outputs.get(i) for i, output in enumerate(old.outputs)}
        found |= {tensor: dtype for tensor, dtype in outputs.items() if dtype}
        return {tensor: dtype for tensor, dtype in found.items() if outputs.get(tensor, dtype)}

    def _weight_type(self, call: relax.VarBinding, weight: relax.Var) -> str:
        """The type that a function reads a weight in, if it has 16 bits; else empty.

        What the model has in 16 bits is that without loss. What was computed of such weights is rounded,
        but for vectors, whose bytes do not matter.
        """
        value = self.old.weights[weight.name]
        if value.dtype != np.float32:
            return ""
        if _name(call) in self.reduced:
            return HALF
        types = [
            self.model.nodes[node] for node in self.old.origins[call.var.name] if node in self.model.nodes
        ]
        if not types:
            return ""
        narrow = _rounded(value, types[-1])
        fits = np.isfinite(narrow).all() if _is_large(value) else (narrow.astype(np.float32) == value).all()
        return types[-1] if fits else ""

    # -------------------------------------------------------------------------------------- writing

    def program(self) -> Program:
        """The program with these tensors in float16."""
        old = self.old
        inputs = [_retyped(v, self.narrow.get((v, 0))) for v in old.inputs]
        builder = ProgramBuilder(inputs)
        self.new.update(zip(old.inputs, inputs, strict=True))
        for binding in old.bindings:
            value, name = binding.value, binding.var.name
            if is_op(value, "call_tir"):
                made = self._call(binding, builder)
            elif isinstance(value, relax.TupleGetItem):
                made = relax.TupleGetItem(self.new[value.tuple_value], value.index)
            else:
                (source,) = variables(value)
                made = relax.op.reshape(self._operand(source, builder), tensor_shape(binding.var))
            self.new[binding.var] = builder.emit(made, old.origins[name], name)
        types = self.model.outputs
        outputs = [self._operand(output, builder, types.get(i, "")) for i, output in enumerate(old.outputs)]
        return builder.finish(outputs, dict(self.functions.values()))

    def _operand(self, var: relax.Var, builder: ProgramBuilder, dtype: str = "") -> relax.Var:
        if var.name not in self.old.weights:
            return self.new[var]
        key = var.name, dtype
        if key not in self.weights:
            value = self.old.weights[var.name]
            name = f"{var.name}.{dtype}" if dtype else var.name
            self.weights[key] = builder.weight(_rounded(value, dtype) if dtype else value, name)
        return self.weights[key]

    def _call(self, binding: relax.VarBinding, builder: ProgramBuilder) -> relax.Call:
        function, arguments = binding.value.args[0], list(binding.value.args[1].fields)
        dtypes, operands = dict[int, str](), []
        for i, argument in enumerate(arguments):
            is_weight = argument.name in self.old.weights
            dtype = self._weight_type(binding, argument) if is_weight else ""
            dtypes[i] = dtype or self.narrow.get(self.tensor(argument), "")
            operands.append(self._operand(argument, builder, dtype))
        results = []
        for i, ty in enumerate(_fields(binding.var.ty)):
            dtype = dtypes[len(arguments) + i] = self.narrow.get((binding.var, i), "")
            results.append(relax.TensorType(ty.shape, dtype) if dtype else ty)
        types = results if isinstance(binding.var.ty, relax.TupleType) else results[0]
        called = self._function(function, {i: dtype for i, dtype in dtypes.items() if dtype})
        return relax.call_tir(called, operands, types)

    def _function(self, old: tvm.ir.GlobalVar, dtypes: Mapping[int, str]) -> tvm.ir.GlobalVar:
        name = old.name_hint
        types = "_".join(dict.fromkeys(dtypes.values()))
        marked = f"{name}_{types}_{'_'.join(map(str, dtypes))}" if dtypes else name
        if marked not in self.functions:
            function = stored(self.old.module[old], dtypes) if dtypes else self.old.module[old]
            if dtypes and name in self.reduced:
                function = function.with_attr(PRECISION, FP16)
            variable = tvm.ir.GlobalVar(marked)
            relax.expr._update_type(variable, function.ty)
            self.functions[marked] = variable, function.with_attr("global_symbol", marked)
        return self.functions[marked][0]


def _name(call: relax.VarBinding) -> str:
    return str(call.value.args[0].name_hint)


def _viewed(value: relax.Expr) -> tuple[relax.Var, int | None]:
    """What a reshape or a projection sees, and which field."""
    if isinstance(value, relax.TupleGetItem):
        return value.tuple_value, value.index
    return value.args[0], None


def _fields(ty: relax.Type) -> list[relax.TensorType]:
    return list(ty.fields) if isinstance(ty, relax.TupleType) else [ty]


def _dtype(ty: relax.TensorType) -> str:
    return str(getattr(ty.dtype, "dtype", ty.dtype))


def _retyped(var: relax.Var, dtype: str | None) -> relax.Var:
    return relax.Var(var.name, relax.TensorType(var.ty.shape, dtype)) if dtype else var


def _rounded(value: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        return value.astype(dtype)


def _is_large(value: np.ndarray) -> bool:
    """Whether it has more than one axis of several elements."""
    return sum(extent > 1 for extent in value.shape) > 1
