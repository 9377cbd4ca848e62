"""Which tensors between kernels are 16-bit floats in memory, and the functions that read and write them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm_ffi import structural_equal

from hybridc.options import BF16, FP16
from hybridc.passes.precision.precision import attention_masks
from hybridc.passes.precision.small_tensors import SMALL_BYTES, affordable
from hybridc.passes.precision.wide_program import NarrowTensors
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    Tensor,
    called_function,
    is_op,
    tensor_of,
    tensor_shape,
    variables,
)
from hybridc.placeholders import is_placeholder, placeholder
from hybridc.schedules.cuda.attention.tensor_core import attention_factors
from hybridc.schedules.cuda.tensor_core.tensor_core import multiplied_factors, tensor_core_factors
from hybridc.schedules.rule import PRECISION, Request
from hybridc.schedules.storage import WIDE, stored
from hybridc.targets import Target

HALF, BFLOAT = "float16", "bfloat16"


def store_narrow(
    program: Program,
    narrow: NarrowTensors,
    target: Target,
    reduced: Set[str] = frozenset(),
    rounded: Set[relax.Var] = frozenset(),
) -> Program:
    """Store tensors in 16 bits: those that the model has so, in float16 what `reduced` functions share, and
    in bfloat16 those that are `rounded` before they are multiplied.

    Requires: `program` fused.
    Ensures: inputs and outputs have the types of the model. A tensor that a function of `reduced` writes is
    float16 if only such functions read it; of weights each function reads its own. One of
    `rounded` that a function writes is bfloat16 unless it is an output. Small tensors between
    kernels stay float32 where the network needs no more bytes for that and no tensor cores multiply them.
    Arithmetic stays float32. Functions that read or write 16 bits are new ones, whose names tell which of
    their parameters these are. Casts between what has the same type then are left out.
    Raises: nothing of its own.
    """
    if not narrow and not reduced and not rounded:
        return program
    return _Writer(program, narrow, target, reduced, rounded).program()


@dataclass
class _Writer:
    old: Program
    model: NarrowTensors
    target: Target
    reduced: Set[str]
    rounded: Set[relax.Var]
    new: dict[relax.Var, relax.Var] = field(default_factory=dict)
    functions: dict[str, tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = field(default_factory=dict)
    weights: dict[tuple[str, str], relax.Var] = field(default_factory=dict)
    factors: dict[tuple[str, tuple[tuple[int, str], ...]], Set[int]] = field(default_factory=dict)
    """What tensor cores multiply, by function and the types that it stores."""
    masks: dict[str, Set[int]] = field(default_factory=dict)
    """Positions of the masks of attention, by function."""

    def __post_init__(self) -> None:
        self.calls = [b for b in self.old.bindings if is_op(b.value, "call_tir")]
        self.values = {b.var: b.value for b in self.old.bindings}
        self.narrow = self._narrow_tensors()

    # ------------------------------------------------------------------------------------ decisions

    def tensor(self, var: relax.Var) -> Tensor:
        return tensor_of(var, self.values)

    def _narrow_tensors(self) -> dict[Tensor, str]:
        old, model = self.old, self.model
        found = {(v, 0): model.inputs[v.name] for v in old.inputs if v.name in model.inputs}
        written = {self.tensor(output) for output in old.outputs}
        read_in_full, rounded = set(written), {self.tensor(v) for v in self.rounded} - written
        for call in self.calls:
            masks, is_reduced = self._masks(call), called_function(call) in self.reduced
            read_in_full |= {
                self.tensor(v)
                for v in call.value.args[1].fields
                if isinstance(v, relax.Var) and (v in masks or not is_reduced)
            }
        for call in self.calls:
            origins = old.origins[call.var.name]
            dtype = model.nodes.get(origins[-1], "") if origins else ""
            for i, ty in enumerate(_fields(call.var.ty)):
                tensor = (call.var, i)
                if called_function(call) in self.reduced and tensor not in read_in_full:
                    dtype = dtype or HALF
                if tensor in rounded:
                    dtype = dtype or BFLOAT
                if _dtype(ty) == WIDE and dtype:
                    found[tensor] = dtype
        outputs = {self.tensor(output): model.outputs.get(i) for i, output in enumerate(old.outputs)}
        found |= {tensor: dtype for tensor, dtype in outputs.items() if dtype}
        found = {tensor: dtype for tensor, dtype in found.items() if outputs.get(tensor, dtype)}
        wide = self._wide_tensors(found, outputs.keys())
        return {tensor: dtype for tensor, dtype in found.items() if tensor not in wide}

    def _wide_tensors(self, narrow: Mapping[Tensor, str], outputs: Set[Tensor]) -> Set[Tensor]:
        """Those of the model's tensors whose 16 bits save neither bytes nor time."""
        touched = [self._arguments(call).keys() | _results(call).keys() for call in self.calls]
        types = {(v, 0): v.ty for v in self.old.inputs}
        for call in self.calls:
            types |= _results(call)
        nbytes = {t: _nbytes(ty, narrow.get(t, _dtype(ty))) for t, ty in types.items()}
        multiplied = {tensor for call in self.calls for tensor in self._multiplied(call, narrow)}
        added = {
            tensor: nbytes[tensor]
            for call in self.calls
            if called_function(call) not in self.reduced
            for tensor in _results(call)
            if tensor in narrow and tensor not in outputs | multiplied and 2 * nbytes[tensor] <= SMALL_BYTES
        }
        computed = outputs & types.keys()  # one may be a weight
        return affordable([*touched, computed], [*map(self._weight_bytes, self.calls), 0], nbytes, added)

    def _multiplied(self, call: relax.VarBinding, narrow: Mapping[Tensor, str]) -> Set[Tensor]:
        """What tensor cores multiply."""
        if not self.target.has_gpu:
            return set()
        name, dtypes = called_function(call), self._dtypes(call, narrow)
        key = name, tuple(dtypes.items())
        if key not in self.factors:
            function = stored(self.old.module[name], dtypes) if dtypes else self.old.module[name]
            request = Request(function, frozenset(), self.target)
            # what is marked is multiplied so, though it has few rows
            factors = multiplied_factors if request.precision == BF16 else tensor_core_factors
            self.factors[key] = factors(request) or attention_factors(request)
        return {t for t, position in self._arguments(call).items() if position in self.factors[key]}

    def _arguments(self, call: relax.VarBinding) -> Mapping[Tensor, int]:
        """The tensors that a call reads, and where they stand among its arguments; without weights."""
        arguments = enumerate(call.value.args[1].fields)
        return {self.tensor(v): i for i, v in arguments if v.name not in self.old.weights}

    def _masks(self, call: relax.VarBinding) -> Set[relax.Var]:
        """What a function whose other tensors are float16 reads in float32."""
        name = called_function(call)
        if name not in self.masks:
            is_reduced = name in self.reduced
            self.masks[name] = attention_masks(self.old.module[name]) if is_reduced else frozenset()
        return {call.value.args[1].fields[i] for i in self.masks[name]}

    def _weight_bytes(self, call: relax.VarBinding) -> int:
        weights = {v for v in call.value.args[1].fields if v.name in self.old.weights}
        return sum(_nbytes(v.ty, self._weight_type(call, v) or _dtype(v.ty)) for v in weights)

    def _dtypes(self, call: relax.VarBinding, narrow: Mapping[Tensor, str]) -> Mapping[int, str]:
        """The types of 16 bits of a call's arguments, and of its results behind them."""
        arguments = call.value.args[1].fields
        types = [
            self._weight_type(call, v) if v.name in self.old.weights else narrow.get(self.tensor(v), "")
            for v in arguments
        ]
        types += [narrow.get(tensor, "") for tensor in _results(call)]
        return {i: dtype for i, dtype in enumerate(types) if dtype}

    def _weight_type(self, call: relax.VarBinding, weight: relax.Var) -> str:
        """The type that a function reads a weight in, if it has 16 bits; else empty.

        What the model has in 16 bits is that without loss. What was computed of such weights is rounded,
        but for vectors, whose bytes do not matter.
        """
        value = self.old.weights[weight.name]
        if value.dtype != np.float32:
            return ""
        if called_function(call) in self.reduced:
            return "" if weight in self._masks(call) else HALF
        types = [
            self.model.nodes[node] for node in self.old.origins[call.var.name] if node in self.model.nodes
        ]
        if not types:
            return ""
        if is_placeholder(value):
            return types[-1]
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
                if (unchanged := self._unchanged(binding)) is not None:
                    self.new[binding.var] = unchanged
                    continue
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

    def _unchanged(self, binding: relax.VarBinding) -> relax.Var | None:
        """What a cast reads that changes nothing any more, as of a tensor that only moves elements do."""
        function, arguments = binding.value.args[0], binding.value.args[1].fields
        if len(arguments) != 1 or arguments[0].name in self.old.weights or not self._casts(function):
            return None
        types = [_dtype(ty) for ty in (arguments[0].ty, binding.var.ty)]
        narrow = self._dtypes(binding, self.narrow)
        read, written = (narrow.get(i, dtype) for i, dtype in enumerate(types))
        return self.new[arguments[0]] if read == written else None

    def _casts(self, variable: tvm.ir.GlobalVar) -> bool:
        """Whether a function does nothing but cast each element of its only operand."""
        function = self.old.module[variable]
        stores: list[tirx.BufferStore] = []
        tvm_ffi.structural_walk(function.body, (tirx.BufferStore, stores.append))
        if len(stores) != 1 or len(function.params) != 2:
            return False
        value = stores[0].value
        value = value.value if isinstance(value, tirx.Cast) else value
        return (
            isinstance(value, tvm.ir.TensorLoad)
            and value.source.same_as(function.params[0])
            and structural_equal(function.params[0].shape, function.params[1].shape)
            and structural_equal(value.indices, stores[0].indices)
        )

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
        function, arguments = binding.value.args[0], binding.value.args[1].fields
        dtypes = self._dtypes(binding, self.narrow)
        operands = [
            self._operand(argument, builder, dtypes.get(i, "") if argument.name in self.old.weights else "")
            for i, argument in enumerate(arguments)
        ]
        results = [
            relax.TensorType(ty.shape, dtypes[i]) if i in dtypes else ty
            for i, ty in enumerate(_fields(binding.var.ty), len(arguments))
        ]
        types = results if isinstance(binding.var.ty, relax.TupleType) else results[0]
        return relax.call_tir(self._function(function, dtypes), operands, types)

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


def _results(call: relax.VarBinding) -> dict[Tensor, relax.TensorType]:
    return {(call.var, i): ty for i, ty in enumerate(_fields(call.var.ty))}


def _fields(ty: relax.Type) -> list[relax.TensorType]:
    return list(ty.fields) if isinstance(ty, relax.TupleType) else [ty]


def _dtype(ty: relax.TensorType) -> str:
    return str(getattr(ty.dtype, "dtype", ty.dtype))


def _nbytes(ty: relax.TensorType, dtype: str) -> int:
    return math.prod(int(extent) for extent in ty.shape) * np.dtype(dtype).itemsize


def _retyped(var: relax.Var, dtype: str | None) -> relax.Var:
    return relax.Var(var.name, relax.TensorType(var.ty.shape, dtype)) if dtype else var


def _rounded(value: np.ndarray, dtype: str) -> np.ndarray:
    if is_placeholder(value):
        return placeholder(value.shape, dtype)
    with np.errstate(over="ignore"):
        return value.astype(dtype)


def _is_large(value: np.ndarray) -> bool:
    """Whether it has more than one axis of several elements."""
    return sum(extent > 1 for extent in value.shape) > 1
