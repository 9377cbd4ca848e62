"""Requantization: behind an integer product one multiply-add, rounding and clipping for each quantizer.

A network that a quantizer wrote has, behind an integer product, a chain such as

    q1 = quantize(sums * c, s1, z1);  y = dequantize(q1, s1, z1) * g + b;  q2 = quantize(y, s2, z2)

whose scales are all known. A tensor here is `sum over terms of factor * term, plus shift` with known factors,
which are multiplied in float64 when compiling. Integers that only `dequantize` reads are never made: floats
have the same whole numbers.

    v1 = clip(round(sums * (c / s1)) + z1)
    q2 = clip(round(v1 * (s1 g / s2) + (b - s1 g z1) / s2) + z2)

That differs from divisions by rounding errors of float32 alone, which matter where a number lies between two
steps. Sums of two tensors are divided, since with scales of which one is twice the other half of them lie
there. What other kernels read, and what waits for another kernel, stays in 8 bits. (Jacob et al.,
"Quantization and training of neural networks for efficient integer-arithmetic-only inference", CVPR 2018,
section 2.2.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    count_uses,
    is_op,
    substitute,
    tensor_dtype,
    tensor_shape,
    variables,
)

BYTES = ("uint8", "int8")
_LEAST, _GREATEST = 1e-30, 1e30
"""Scales whose products and quotients with others are normal numbers; none of a quantizer is beyond."""


@dataclass(frozen=True, slots=True)
class Term:
    """`factor * (var - zero)`."""

    var: relax.Expr
    """Of 8-bit numbers, which are widened where the term is written, or float32."""
    factor: np.ndarray
    """float64, of a shape that broadcasts."""
    zero: int = 0


@dataclass(frozen=True, slots=True)
class Affine:
    """The sum of some terms and a shift, float64, none of which is written yet."""

    terms: tuple[Term, ...]
    shift: np.ndarray

    @classmethod
    def of(cls, var: relax.Expr, factor: float = 1.0, zero: int = 0) -> Affine:
        """A term alone."""
        return cls((Term(var, np.array(factor), zero),), np.array(0.0))

    def times(self, factor: np.ndarray) -> Affine:
        """All of it multiplied."""
        terms = tuple(replace(term, factor=term.factor * factor) for term in self.terms)
        return Affine(terms, self.shift * factor)

    def plus(self, other: Affine) -> Affine:
        """The sum of both."""
        return Affine((*self.terms, *other.terms), self.shift + other.shift)

    @property
    def without_zero(self) -> Affine:
        """The same with the zero point in the shift; not where there is none, so that what has the number of
        the zero point becomes exactly 0, nor in sums, which stay in the order that the network has."""
        if len(self.terms) > 1 or not self.shift.any():
            return self
        (term,) = self.terms
        return Affine((replace(term, zero=0),), self.shift - term.factor * term.zero)


@dataclass
class _State:
    """The new program as far as it is written."""

    old: Program
    builder: ProgramBuilder
    new: dict[relax.Var, relax.Expr]
    """By variable of the old program."""
    affine: dict[relax.Expr, Affine] = field(default_factory=dict)
    """What old variables are that are perhaps not written yet."""
    whole: dict[relax.Expr, relax.Var] = field(default_factory=dict)
    """As float32 the whole numbers that old 8-bit variables, which are never made, would have."""
    folded: dict[relax.Expr, tuple[str, ...]] = field(default_factory=dict)
    """ONNX nodes of old variables that are not written."""
    origins: tuple[str, ...] = ()

    def known(self, expr: relax.Expr) -> np.ndarray | None:
        """The value of an operand of the old program that is known when compiling."""
        if isinstance(expr, GenericConst):
            return expr.value.numpy()
        return self.old.weights.get(expr.name) if isinstance(expr, relax.Var) else None

    def emit(self, expr: relax.Expr, hint: str) -> relax.Var:
        return self.builder.emit(expr, self.origins, hint)

    def read(self, var: relax.Var) -> relax.Expr:
        """A variable of the old program, written here at the latest."""
        if var not in self.new:
            self.new[var] = self.written(self.affine[var])
        return self.new[var]

    def number(self, value: np.ndarray, hint: str) -> relax.Var:
        """A weight with this value, float32; as a constant it would be a part of the function, which kernels
        then could not share."""
        return self.builder.weight(np.asarray(value, "float32"), hint)

    def written(self, value: Affine) -> relax.Var:
        """The sum, term by term."""
        value = value.without_zero
        total, *others = (self._written_term(term) for term in value.terms)
        for other in others:
            total = self.emit(relax.op.add(total, other), "sum")
        if value.shift.any():
            total = self.emit(relax.op.add(total, self.number(value.shift, "shift")), "shifted")
        return total

    def _written_term(self, term: Term) -> relax.Var:
        var = term.var
        if tensor_dtype(var) != "float32":
            var = self.emit(relax.op.astype(var, "float32"), "widened")
        if term.zero:
            var = self.emit(relax.op.subtract(var, self.number(np.array(term.zero), "zero")), "steps")
        if (term.factor == 1).all():
            return var
        return self.emit(relax.op.multiply(var, self.number(term.factor, "factor")), "scaled")


def requantize(program: Program) -> Program:
    """Replace what stands between integer products and quantizers.

    Requires: products of integers by `quantized.py`, whose sums are int32.
    Ensures: inputs and outputs of `main` as they were; every binding has origins.
    Raises: nothing of its own.
    """
    builder = ProgramBuilder(program.inputs)
    state = _State(program, builder, builder.take_parameters(program))
    old = _Old.of(program)
    for binding in program.bindings:
        var = binding.var
        inherited = [name for v in variables(binding.value) for name in state.folded.get(v, ())]
        state.origins = (*inherited, *program.origins.get(var.name, ()))
        if old.adds_up(binding.value):
            state.affine[var] = Affine.of(_copied(state, binding))
        elif (affine := _affine(state, old, binding)) is not None:
            state.affine[var] = affine
            if old.uses[var] > 1:  # by several kernels, perhaps
                state.affine[var] = Affine.of(state.read(var))
            else:
                state.folded[var] = state.origins
        elif not _quantized(state, old, binding):
            state.new[var] = _copied(state, binding)
    outputs = [substitute(output, state.read) for output in program.outputs]
    return builder.finish(outputs, program.functions)


def _copied(state: _State, binding: relax.VarBinding) -> relax.Var:
    return state.emit(substitute(binding.value, state.read), binding.var.name)


@dataclass(frozen=True, slots=True)
class _Old:
    """What is known of the old program."""

    values: dict[relax.Var, Any]
    position: dict[relax.Var, int]
    uses: dict[relax.Var, int]
    reader: dict[relax.Var, relax.VarBinding]
    """The last that reads a variable."""

    @classmethod
    def of(cls, program: Program) -> _Old:
        bindings = program.bindings
        reader = {v: binding for binding in bindings for v in variables(binding.value)}
        position = {binding.var: i for i, binding in enumerate(bindings)}
        return cls({b.var: b.value for b in bindings}, position, count_uses(program), reader)

    def adds_up(self, value: Any) -> bool:
        """Whether it is the sums of an integer product, as floats."""
        if not is_op(value, "astype") or tensor_dtype(value.args[0]) != "int32":
            return False
        corrected: Any = self.values.get(value.args[0])
        product: Any = self.values.get(corrected.args[0]) if is_op(corrected, "add") else None
        return is_op(product, "call_tir") and product.args[0].name_hint.startswith("int8_")

    def only_reader(self, var: relax.Var) -> relax.VarBinding | None:
        """The binding that alone reads a variable, once."""
        return self.reader.get(var) if self.uses[var] == 1 else None

    def waits(self, var: relax.Var) -> bool:
        """Whether a dequantized tensor is added to what a later kernel computes."""
        reader = self.only_reader(var)
        if reader is None or not is_op(reader.value, "add"):
            return False
        return any(self._comes_later(v, self.position[var]) for v in variables(reader.value) if v is not var)

    def _comes_later(self, var: relax.Var, position: int) -> bool:
        """Whether a function is called behind `position` that a variable depends on."""
        if self.position.get(var, -1) <= position:
            return False
        value = self.values[var]
        return is_op(value, "call_tir") or any(self._comes_later(v, position) for v in variables(value))


def _affine(state: _State, old: _Old, binding: relax.VarBinding) -> Affine | None:
    """What a binding is, if all that it reads is known to be such."""
    call: Any = binding.value
    if is_op(call, "dequantize"):
        return _dequantized(state, binding)
    if is_op(call, "nn.relu", "clip") and call.args[0] in state.affine:
        return Affine.of(_copied(state, binding))
    if not is_op(call, "add", "multiply") or tensor_dtype(binding.var) != "float32":
        return None
    shape = tensor_shape(binding.var)
    left, right = call.args
    if left not in state.affine:
        left, right = right, left
    if left not in state.affine or tensor_shape(left) != shape:
        return None
    value, known = state.affine[left], state.known(right)
    if known is not None:
        # as large as the tensor it would be no scale or bias, and its products are weights of their own
        if known.size > 1 and known.size == math.prod(shape):
            return None
        operand = known.astype("float64")
        return (
            value.times(operand) if is_op(call, "multiply") else replace(value, shift=value.shift + operand)
        )
    both = is_op(call, "add") and right in state.affine and tensor_shape(right) == shape
    return value.plus(state.affine[right]) if both and left is not right else None


def _scalar(state: _State, call: Any) -> tuple[float, int] | None:
    """Scale and zero point of a quantizer of 8 bits, if each is one number."""
    known = [state.known(argument) for argument in call.args[1:3]]
    if any(value is None or value.size != 1 for value in known):
        return None
    scale, zero = (value.reshape(()) for value in known if value is not None)
    return (float(scale), int(zero)) if _LEAST < float(scale) < _GREATEST else None


def _dequantized(state: _State, binding: relax.VarBinding) -> Affine | None:
    call: Any = binding.value
    found = _scalar(state, call)
    source = call.args[0]
    if found is None or state.known(source) is not None or tensor_dtype(binding.var) != "float32":
        return None
    if source in state.whole:
        return Affine.of(state.whole[source], *found)
    return Affine.of(state.read(source), *found) if tensor_dtype(source) in BYTES else None


def _quantized(state: _State, old: _Old, binding: relax.VarBinding) -> bool:
    """Write the whole numbers of a quantized tensor, as bytes if another kernel reads them."""
    call: Any = binding.value
    if not is_op(call, "quantize") or call.args[0] not in state.affine:
        return False
    found, dtype = _scalar(state, call), tensor_dtype(binding.var)
    value = state.affine[call.args[0]]
    if found is None or dtype not in BYTES or len(value.terms) > 1 or not _has_product(value):
        return False
    scale, zero = found
    whole = state.emit(relax.op.round(state.written(value.times(np.array(1 / scale)))), "rounded")
    if zero:
        whole = state.emit(relax.op.add(whole, state.number(np.array(zero), "zero")), "shifted")
    # constants, unlike weights, are a part of the function; all kernels have these
    for operator, limit in ((relax.op.maximum, np.iinfo(dtype).min), (relax.op.minimum, np.iinfo(dtype).max)):
        whole = state.emit(operator(whole, relax.const(float(limit), "float32")), "whole")
    reader = old.only_reader(binding.var)
    if reader is not None and _is_read_here(state, old, reader):
        state.whole[binding.var] = whole
    else:
        state.new[binding.var] = state.emit(relax.op.astype(whole, dtype), binding.var.name)
    return True


def _has_product(value: Affine) -> bool:
    """Whether an integer product is among the terms, and not only what other kernels have stored."""
    return any(tensor_dtype(term.var) == "float32" for term in value.terms)


def _is_read_here(state: _State, old: _Old, reader: relax.VarBinding) -> bool:
    """Whether the kernel that quantizes a tensor dequantizes it, too."""
    is_known = is_op(reader.value, "dequantize") and _scalar(state, reader.value) is not None
    return is_known and not old.waits(reader.var)
