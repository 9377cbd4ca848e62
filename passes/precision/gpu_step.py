"""Training steps for a GPU in bfloat16: what tensor cores multiply, and which tensors lie in memory as such.

Activations and their gradients are bfloat16 on both devices. Parameters, their gradients, the optimizer's
states, statistics and what the loss is computed of stay float32. A factor that is float32 in memory, such as
a parameter, is rounded in front of each product that tensor cores make of it, by a kernel of its own: a copy
that lives for one product takes no memory from the rest of the step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import tvm
from tvm import relax, s_tir, te, tirx

from hybridc.machine import Processor
from hybridc.options import BF16, FP32
from hybridc.passes.precision.precision import adds_up_products, attention_masks, marked
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    Tensor,
    called_function,
    function_of_call,
    is_op,
    substitute,
    tensor_dtype,
    tensor_of,
    tensor_shape,
)
from hybridc.passes.schedule import schedule_requests
from hybridc.schedules.cpu.core.nest import read_block
from hybridc.schedules.cuda.attention.tensor_core import attention_factors
from hybridc.schedules.cuda.tensor_core.tensor_core import multiplied_factors, tensor_cores_pay
from hybridc.schedules.rule import Request
from hybridc.schedules.shapes import index_shape
from hybridc.schedules.storage import WIDE, stored
from hybridc.targets import Target

BFLOAT = "bfloat16"
_NO_KERNEL = "no kernel for tensor cores computes this"
_NO_GAIN = "fp32 is predicted to be faster"
_STATISTICS = 32
"""Elements read for each that is written, from which on a reduction's result stays float32, as a mean of rows
does: its bytes do not matter, but all that is computed of it depends on it. Windows of pooling have fewer."""


def reduce_gpu_step_precision(
    program: Program, target: Target, gpu: Processor, *, winograd: bool = True
) -> tuple[Program, frozenset[relax.Var]]:
    """Mark functions of a training step for tensor cores; and the variables to be stored as bfloat16.

    Requires: `program` fused, its first output the loss; a target whose GPUs all multiply bfloat16. Times on
    `gpu` decide what is faster on tensor cores, rounding included.
    Ensures: functions that sum products have the attribute PRECISION if tensor cores make these of bfloat16,
    else PRECISION_NOTE, which says why not. The factors of the first ones are among the variables: float32
    tensors are copied in front of them, and the copies are (`store_narrow` makes them round).
    Raises: nothing of its own.
    """
    products = _products(program, target, gpu, winograd)
    step = _Step(program, products)
    factors, notes = dict[str, frozenset[int]](), dict[str, str]()
    for name, product in products.items():
        if not product.factors:
            notes[name] = _NO_KERNEL
        elif not all(tensor_cores_pay(product.stored(), wide) for wide in step.wide_factors(name)):
            notes[name] = _NO_GAIN
        else:
            factors[name] = product.factors
    written, narrow = step.with_rounded(factors)
    slower = [name for name, note in notes.items() if note == _NO_GAIN]
    return marked(marked(written, FP32, slower, {}), BF16, factors, notes), narrow


# ------------------------------------------------------------------------------------------- functions


@dataclass(frozen=True, slots=True)
class _Product:
    """A function that sums products."""

    request: Request
    masks: frozenset[int]
    """Of attention, whose numbers may exceed the range of bfloat16 when they are rounded."""
    factors: frozenset[int]
    """What tensor cores would multiply; empty if they cannot."""

    def stored(self) -> Request:
        """With all that may be bfloat16 stored so."""
        return _stored(self.request, self.masks)


def _products(program: Program, target: Target, gpu: Processor, winograd: bool) -> dict[str, _Product]:
    found = {}
    requests = schedule_requests(program, target, winograd=winograd, gpu=gpu)
    for name in dict.fromkeys(filter(None, map(called_function, program.bindings))):
        request = requests[name]
        if adds_up_products(request.function):
            masks = attention_masks(request.function)
            narrow = _stored(request, masks)
            found[name] = _Product(request, masks, multiplied_factors(narrow) or attention_factors(narrow))
    return found


def _stored(request: Request, but: Collection[int]) -> Request:
    """The function with all floats but some in bfloat16; nothing about what is known when compiling, since a
    step's parameters are not."""
    dtypes = {
        i: BFLOAT
        for i, parameter in enumerate(request.function.params)
        if str(parameter.dtype) == WIDE and i not in but
    }
    return replace(request, function=stored(request.function, dtypes), constants=frozenset())


def _is_reduction(function: tirx.PrimFunc) -> bool:
    """Whether some block is no map of elements."""
    schedule = s_tir.Schedule(function)
    blocks = [schedule.get(block) for block in schedule.get_child_blocks(schedule.get_sblock("root"))]
    found = [read_block(block) for block in blocks]
    return any(block is None or block.reduce for block in found)


# --------------------------------------------------------------------------------------------- tensors


@dataclass
class _Step:
    """A training step, and which of its tensors are activations or their gradients."""

    program: Program
    products: Mapping[str, _Product]
    reductions: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = {binding.var: binding.value for binding in self.program.bindings}

    def tensor(self, var: relax.Var) -> Tensor:
        """The tensor whose bytes a variable names."""
        return tensor_of(var, self.values)

    def call(self, tensor: Tensor) -> relax.Call | None:
        """What computes a tensor; None for inputs and weights."""
        return self.values.get(tensor[0])

    @cached_property
    def calls(self) -> Mapping[str, Sequence[relax.Call]]:
        """Of each function."""
        found = defaultdict[str, list[relax.Call]](list)
        for value in self.values.values():
            if name := function_of_call(value):
                found[name].append(value)
        return found

    @cached_property
    def readers(self) -> Counter[Tensor]:
        """How many calls and outputs read each tensor."""
        read = Counter(self.tensor(v) for v in self.program.outputs)
        for value in self.values.values():
            if is_op(value, "call_tir"):
                read.update({self.tensor(v) for v in value.args[1].fields})
        return read

    @cached_property
    def narrow(self) -> frozenset[relax.Var]:
        """Variables that name activations and gradients of activations."""
        wide = self._wide()
        return frozenset(
            var
            for var in self.values
            if isinstance(var.ty, relax.TensorType) and tensor_dtype(var) == WIDE
            if self.call(self.tensor(var)) is not None and self.tensor(var) not in wide
        )

    def _wide(self) -> set[Tensor]:
        """Outputs and what they are computed of without a product between, such as gradients of parameters;
        statistics; and masks of attention."""
        loss, *others = (self.tensor(output) for output in self.program.outputs)
        found = {loss, *others}
        self._add_sources([loss], found, self._summands_of_loss)
        self._add_sources(others, found, self._summands_of_gradient)
        for var, value in self.values.items():
            name = function_of_call(value)
            if name in self.products:
                masks = self.products[name].masks
                found |= {self.tensor(value.args[1].fields[i]) for i in masks}
            elif name and self.is_reduction(name):
                found |= _statistics(var, value)
        return found

    def _add_sources(
        self,
        tensors: list[Tensor],
        found: set[Tensor],
        summands: Callable[[relax.Call], list[Tensor]],
    ) -> None:
        """Add what tensors are computed of, where no product is between; of a sum, those that `summands`
        says."""
        todo = list(tensors)
        while todo:
            call = self.call(todo.pop())
            if call is None or function_of_call(call) in self.products:
                continue
            operands = [self.tensor(v) for v in call.args[1].fields]
            if self.is_reduction(function_of_call(call)):
                operands = summands(call)
            todo += [t for t in operands if t not in found]
            found |= set(operands)

    def _summands_of_loss(self, call: relax.Call) -> list[Tensor]:
        """All of them: a loss is a sum of what each example contributes."""
        return [self.tensor(v) for v in call.args[1].fields]

    def _summands_of_gradient(self, call: relax.Call) -> list[Tensor]:
        """Parts of a parameter's gradient that are added up: products that nothing else reads. A bias has the
        sum of what its layer's gradient is, which is one of activations."""
        operands = [self.tensor(v) for v in call.args[1].fields]
        return [
            tensor
            for tensor in operands
            if self.readers[tensor] == 1 and function_of_call(self.call(tensor)) in self.products
        ]

    def is_reduction(self, name: str) -> bool:
        if name not in self.reductions:
            self.reductions[name] = _is_reduction(self.program.module[name])
        return self.reductions[name]

    def wide_factors(self, name: str) -> set[frozenset[int]]:
        """The factors that calls of a product have to round: one set of positions for each kind of call."""
        factors = self.products[name].factors
        arguments = [call.args[1].fields for call in self.calls[name]]
        return {frozenset(i for i in factors if given[i] not in self.narrow) for given in arguments}

    def with_rounded(self, factors: Mapping[str, Collection[int]]) -> tuple[Program, frozenset[relax.Var]]:
        """The program with copies of the factors, by function, that are not narrow; and the variables that
        are narrow in it."""
        program, copies = self.program, _Copies()
        builder = ProgramBuilder(program.inputs)
        new = builder.take_parameters(program)
        for binding in program.bindings:
            value, origins = binding.value, program.origins[binding.var.name]
            copied: dict[relax.Var, relax.Expr] = {}
            for position in sorted(factors.get(function_of_call(value), ())):
                var = value.args[1].fields[position]
                if var not in self.narrow and var not in copied:
                    copied[var] = builder.emit(copies.call(new[var]), origins, f"{var.name}_rounded")
            copies.made.update(copied.values())
            made = substitute(value, partial(_renamed, copied, new))
            new[binding.var] = builder.emit(made, origins, binding.var.name)
        outputs = [substitute(output, new.__getitem__) for output in program.outputs]
        written = builder.finish(outputs, {**program.functions, **dict(copies.functions.values())})
        return written, frozenset({new[v] for v in self.narrow} | copies.made)


@dataclass(frozen=True)
class _Copies:
    """Copies of tensors, and the functions that make them, one for each shape."""

    made: set[relax.Var] = field(default_factory=set)
    functions: dict[tuple[int, ...], tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = field(default_factory=dict)

    def call(self, var: relax.Var) -> relax.Call:
        shape = tensor_shape(var)
        if shape not in self.functions:
            self.functions[shape] = _copy("_".join(map(str, ("rounded", *shape))), shape)
        return relax.call_tir(self.functions[shape][0], [var], relax.TensorType(shape, WIDE))


def _renamed(
    first: Mapping[relax.Var, relax.Expr], then: Mapping[relax.Var, relax.Expr], var: relax.Var
) -> relax.Expr:
    return first[var] if var in first else then[var]


def _statistics(var: relax.Var, call: relax.Call) -> set[Tensor]:
    """Results of a reduction that are far smaller than what it reads."""
    fields = list(var.ty.fields) if isinstance(var.ty, relax.TupleType) else [var.ty]
    read = max((math.prod(tensor_shape(v)) for v in call.args[1].fields), default=0)
    sizes = [math.prod(int(extent) for extent in ty.shape) for ty in fields]
    return {(var, i) for i, size in enumerate(sizes) if size * _STATISTICS <= read}


def _copy(name: str, shape: tuple[int, ...]) -> tuple[tvm.ir.GlobalVar, tirx.PrimFunc]:
    x = te.placeholder(index_shape(shape), WIDE, "x")
    function = te.create_prim_func([x, te.compute(x.shape, lambda *i: x(*i), name="rounded")])
    function = function.with_attrs({"global_symbol": name, "tirx.noalias": True})
    variable = tvm.ir.GlobalVar(name)
    relax.expr._update_type(variable, function.ty)
    return variable, function
