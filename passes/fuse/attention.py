"""Attention: scaled dot-product attention becomes one kernel, which never stores its scores as a tensor.

    softmax(query @ key^T [* scale] [capped by tanh] [+ mask] [where mask, else a number]) @ value

A row of scores needs all keys but only its own query, so it can live in a cache from the first product to the
second (Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021). Transpositions of the operands
and of the result become part of the kernel's indices, and so do keys and values that are repeated for each of
several heads of queries (Ainslie et al., "GQA", 2023): there is no repeated copy.

`suits` says which matches are worth it: another device may have no schedule for some sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.ir.expr import GenericConst

from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    content_number,
    count_uses,
    is_op,
    substitute,
    tensor_dtype,
    tensor_shape,
)
from hybridc.schedules.annotation import Pattern
from hybridc.schedules.blocked_operators import extents, sum_over

SCORE_STEPS = ("divide", "multiply", "add", "subtract", "where", "tanh")
"""Operators that may be applied to the scores before the softmax, with a number or a mask, or alone. The
condition of `where` is given to the kernel as zeros and ones."""


@dataclass(frozen=True, slots=True)
class TransposedOperand:
    """An operand of a product that is a transposed tensor: its axis `i` is the tensor's axis `axes[i]`, of
    which each position counts for `repeats[i]` neighbouring ones (once each if there are none)."""

    tensor: relax.Var
    axes: tuple[int, ...]
    repeats: tuple[int, ...] = ()
    factor: float = 1.0
    """By which its numbers are multiplied."""
    part: tuple[int, int, int] | None = None
    """An axis of the tensor of which the factor has the positions from one to another alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor, before the transposition."""
        return tensor_shape(self.tensor)

    def extent(self, axis: int) -> int:
        """Of an axis of the factor."""
        own, (cut, begin, end) = self.axes[axis], self.part or (-1, 0, 0)
        return (end - begin if own == cut else self.shape[own]) * (self.repeats[axis] if self.repeats else 1)

    def permuted(self, permutation: Sequence[int]) -> TransposedOperand:
        """The same factor as the transposition of what its tensor is made of by `permutation`."""
        return replace(self, axes=tuple(permutation[a] for a in self.axes))

    def repeated(self, axis: int, times: int) -> TransposedOperand:
        """A factor whose axis of this number has each position so many times."""
        repeats = list(self.repeats or (1 for _ in self.axes))
        repeats[axis] *= times
        return replace(self, repeats=tuple(repeats))

    def indices(self, at: Sequence[te.Var]) -> tuple[te.Expr, ...]:
        """Of the tensor's element that is the factor's at a point."""
        repeats = self.repeats or (1 for _ in self.axes)
        own = [i // n if n > 1 else i for i, n in zip(at, repeats, strict=True)]
        placed = dict(zip(self.axes, own, strict=True))
        if self.part is not None and self.part[1]:
            placed[self.part[0]] += self.part[1]
        return tuple(placed[axis] for axis in range(len(at)))


@dataclass(frozen=True, slots=True)
class Attention:
    """One match: operands, the operators on the scores, and the bindings that the kernel replaces."""

    query: TransposedOperand
    key: TransposedOperand
    """Axes batch..., depth, key position."""
    value: TransposedOperand
    steps: tuple[relax.Call, ...]
    scores: relax.Var
    result_axes: tuple[int, ...]
    """Axis of the context `[batch..., query position, depth]` for each axis of the result."""
    members: tuple[relax.Var, ...]
    hides_nan: bool = False
    """Whether weights that are not a number count as zero: those of a query that sees no key."""
    repeated: Mapping[relax.Var, relax.Var] = field(default_factory=dict)
    """Masks that have the rows of another tensor again and again, and that tensor: heads of queries that
    share keys are rows of one head, each with the same mask."""

    @property
    def operands(self) -> tuple[TransposedOperand, TransposedOperand, TransposedOperand]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def rows(self) -> int:
        """Queries of one batch."""
        return self.query.extent(-2)

    @property
    def depth(self) -> int:
        """Of a query."""
        return self.query.extent(-1)

    @property
    def width(self) -> int:
        """Of a value."""
        return self.value.extent(-1)


Suits = Callable[[Attention], bool]
"""Whether a match is to be one kernel."""


def any_attention(_: Attention) -> bool:
    """All of it is."""
    return True


def fuse_attention(program: Program, suits: Suits = any_attention) -> Program:
    """Replace every attention of a float32 program that `suits` by a call of one function, whose name tells
    what it computes.

    Requires: `main` canonical.
    Ensures: every binding has origins; inputs and outputs of `main` as they were.
    Raises: nothing of its own.
    """
    found = [match for match in find_attention(program) if suits(match)]
    if not found:
        return program
    last = {match.members[-1]: match for match in found}
    dropped = {member for match in found for member in match.members}
    builder = ProgramBuilder(program.inputs)
    new = builder.take_parameters(program)

    def renamed(expr: relax.Expr) -> relax.Expr:
        return substitute(expr, lambda var: new.get(var, var))

    functions: dict[str, tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = {}
    for binding in program.bindings:
        origins = program.origins.get(binding.var.name, ())
        if binding.var in last:
            match = last[binding.var]
            names = [o for member in match.members for o in program.origins.get(member.name, ())]

            def as_numbers(mask: relax.Expr, names: list[str] = names) -> relax.Expr:
                made = relax.op.astype(renamed(mask), "float32")
                return builder.emit(made, names, "mask")

            call = _call(match, functions, renamed, as_numbers)
            new[binding.var] = builder.emit(call, names, "attention")
        elif binding.var not in dropped:
            new[binding.var] = builder.emit(renamed(binding.value), origins, binding.var.name)
    made = dict(functions.values())
    return builder.finish([renamed(o) for o in program.outputs], {**program.functions, **made})


def attention_operands(program: Program, suits: Suits) -> list[tuple[relax.Var, ...]]:
    """Of every attention that `suits`, the tensors that its queries, keys and values are made of."""
    found = [match for match in find_attention(program) if suits(match)]
    return [tuple(operand.tensor for operand in match.operands) for match in found]


# ------------------------------------------------------------------------------------------ matching


def find_attention(program: Program) -> list[Attention]:
    """Every attention of a canonical program that is in float32, whatever its sizes."""
    values = {b.var: b.value for b in program.bindings}
    uses = count_uses(program)
    readers: dict[relax.Expr, relax.Var] = {}
    for binding in program.bindings:
        if isinstance(binding.value, relax.Call):
            readers |= {a: binding.var for a in binding.value.args if isinstance(a, relax.Var)}
    softmaxes = [b.var for b in program.bindings if is_op(b.value, "nn.softmax")]
    zeros = {v for v in program.main.params if _is_zero(program.weights.get(v.name))}
    matches = (_match(var, values, uses, readers, zeros) for var in softmaxes)
    return [match for match in matches if match is not None]


def _match(
    softmax: relax.Var,
    values: dict[relax.Var, Any],
    uses: Counter[relax.Var],
    readers: dict[relax.Expr, relax.Var],
    zeros: Collection[relax.Expr],
) -> Attention | None:
    rank = len(tensor_shape(softmax))
    call = values[softmax]
    if rank < 3 or tensor_dtype(softmax) != "float32" or int(call.attrs.axis) % rank != rank - 1:
        return None
    steps: list[relax.Call] = []
    chain = [softmax]
    scores = call.args[0]
    while uses[scores] == 1 and is_op(values.get(scores), *SCORE_STEPS):
        steps.insert(0, values[scores])
        chain.insert(0, scores)
        inner = [a for a in values[scores].args if _carries_scores(a, values, tensor_shape(softmax))]
        if len(inner) != 1:
            return None
        scores = inner[0]
    first: Any = values.get(scores)
    guard = _guard(softmax, values, uses, readers, zeros)
    weights = guard[-1] if guard else softmax
    context = readers.get(weights)
    if not is_op(first, "matmul") or uses[scores] != 1 or uses[weights] != 1 or context is None:
        return None
    second = values[context]
    if not is_op(second, "matmul") or not second.args[0].same_as(weights):
        return None
    members = [scores, *chain, *guard, context]
    key = _operand(first.args[1], values, uses, members, is_scaled=True)
    # ONNX's body of Attention scales queries and keys; of queries alone the kernel that makes them does it
    query = _operand(first.args[0], values, uses, members, is_scaled=key.factor != 1.0)
    value = _operand(second.args[1], values, uses, members)
    if (scale := query.factor * key.factor) != 1.0:
        steps.insert(0, relax.op.multiply(scores, relax.const(scale, "float32")))
    factors = first.args[0], first.args[1], second.args[1]
    batch = tensor_shape(softmax)[:-2]
    if any(len(tensor_shape(a)) != rank for a in factors) or tensor_shape(factors[0])[:-2] != batch:
        return None
    key, value = (_broadcast(operand, batch) for operand in (key, value))
    result_axes = tuple(range(rank))
    after = readers.get(context)
    if uses[context] == 1 and after is not None and is_op(values[after], "permute_dims"):
        result_axes = _permutation(values[after], rank)
        members.append(after)
    masks = [a for step in steps for a in step.args if isinstance(a, relax.Var)]
    repeated = {mask: rows for mask in masks if (rows := _repeated_rows(mask, values)) is not None}
    return Attention(
        query, key, value, tuple(steps), scores, result_axes, tuple(members), bool(guard), repeated
    )


def _repeated_rows(mask: relax.Var, values: dict[relax.Var, Any]) -> relax.Var | None:
    """The tensor of whose rows a mask is made, if it has them again and again."""
    value: Any = values.get(mask)
    rank = len(tensor_shape(mask))
    if not is_op(value, "concat") or not isinstance(value.args[0], relax.Tuple):
        return None
    first, *others = value.args[0].fields
    is_same = isinstance(first, relax.Var) and all(each.same_as(first) for each in others)
    has_rows = int(value.attrs.axis) % rank == rank - 2 and tensor_shape(first)[-2] > 1
    return first if is_same and has_rows else None


def _guard(
    softmax: relax.Var,
    values: dict[relax.Var, Any],
    uses: Counter[relax.Var],
    readers: dict[relax.Expr, relax.Var],
    zeros: Collection[relax.Expr],
) -> list[relax.Var]:
    """The bindings that make zeros of weights that are not a number, as torch's exporters write them.

    `zeros` are parameters that are zero: one constant of a model may be the zero of all layers.
    """
    last = readers.get(softmax)
    value = None if last is None else values[last]
    if last is None or value is None or not is_op(value, "where") or uses[softmax] != 2:
        return []
    condition, zero, kept = value.args
    test: Any = values.get(condition)
    is_zero = zero in zeros or (_is_number(zero) and float(zero.value.numpy()) == 0.0)
    is_guard = is_op(test, "isnan") and uses[condition] == 1 and test.args[0].same_as(softmax)
    return [condition, last] if is_zero and is_guard and kept.same_as(softmax) else []


def _carries_scores(operand: relax.Expr, values: dict[relax.Var, Any], shape: tuple[int, ...]) -> bool:
    if not isinstance(operand, relax.Var) or tensor_shape(operand) != shape:
        return False
    return is_op(values.get(operand), "matmul", *SCORE_STEPS)


def _operand(
    var: relax.Var,
    values: dict[relax.Var, Any],
    uses: Counter[relax.Var],
    members: list[relax.Var],
    *,
    is_scaled: bool = False,
) -> TransposedOperand:
    """A factor as the transposition of another tensor, if the transposed one has no other readers; with
    `is_scaled`, as a multiple of it."""
    rank = len(tensor_shape(var))
    found = TransposedOperand(var, tuple(range(rank)))
    while uses[var] == 1:
        value: Any = values.get(var)
        if is_op(value, "permute_dims"):
            made, source = [var], value.args[0]
            found = found.permuted(_permutation(value, rank))
        elif is_scaled and is_op(value, "multiply") and _is_number(value.args[1]):
            made, source = [var], value.args[0]
            found = replace(found, factor=found.factor * float(value.args[1].value.numpy()))
        elif (repeat := _repeat(var, values, uses)) is not None:
            made, source, axis, times = repeat
            found = found.repeated(found.axes.index(axis), times)
        else:
            break
        members[:0] = made
        var = source
    if uses[var] == 1 and (part := _heads(values.get(var), values)) is not None:
        members.insert(0, var)
        return replace(found, tensor=values[var].args[0], part=part)
    return replace(found, tensor=var)


def _heads(value: Any, values: dict[relax.Var, Any]) -> tuple[int, int, int] | None:
    """The part that a slice is of heads that one product makes, of several operands (`join_heads`)."""
    if not is_op(value, "strided_slice") or not is_op(values.get(value.args[0]), "reshape"):
        return None
    axes, begin, end, *strides = ([int(i) for i in argument.fields] for argument in value.args[1:])
    extent = tensor_shape(value.args[0])[axes[0]]
    is_part = len(axes) == 1 and axes[0] >= 0 and 0 <= begin[0] < end[0] <= extent
    return (axes[0], begin[0], end[0]) if is_part and strides in ([], [[1]]) else None


def _is_zero(weight: np.ndarray | None) -> bool:
    return weight is not None and weight.size == 1 and not weight.any()


def _is_number(expr: relax.Expr) -> bool:
    return isinstance(expr, GenericConst) and expr.value.ndim == 0


def _repeat(
    var: relax.Var, values: dict[relax.Var, Any], uses: Counter[relax.Var]
) -> tuple[list[relax.Var], relax.Var, int, int] | None:
    """The bindings that make a tensor of another one by repeating each position of an axis, the other tensor,
    the axis, and how often.

    An axis of one position is made longer; or a new one behind it is, and both are joined.
    """
    made, value = [var], values.get(var)
    is_joined = is_op(value, "reshape")
    for operators in (("broadcast_to",), ("expand_dims", "reshape")) if is_joined else ():
        assert value is not None
        made.insert(0, value.args[0])
        value = values.get(made[0])
        if not is_op(value, *operators):
            return None
    if (
        value is None
        or any(uses[each] != 1 for each in made)
        or not (is_joined or is_op(value, "broadcast_to"))
    ):
        return None
    source = value.args[0]
    shape, result = tensor_shape(source), tensor_shape(var)
    longer = [axis for axis, (n, m) in enumerate(zip(shape, result, strict=False)) if n != m]
    if len(shape) != len(result) or len(longer) != 1 or result[longer[0]] % shape[longer[0]]:
        return None
    axis, times = longer[0], result[longer[0]] // shape[longer[0]]
    front, behind = shape[: axis + 1], shape[axis + 1 :]
    if is_joined and [tensor_shape(v) for v in made[:2]] != [(*front, n, *behind) for n in (1, times)]:
        return None
    return made, source, axis, times


def _broadcast(operand: TransposedOperand, batch: Sequence[int]) -> TransposedOperand:
    """A factor whose single positions of batch axes a product reads for all."""
    for axis, extent in enumerate(batch):
        if operand.extent(axis) != extent:
            operand = operand.repeated(axis, extent)
    return operand


def _permutation(call: relax.Call, rank: int) -> tuple[int, ...]:
    axes = call.attrs.axes
    return tuple(reversed(range(rank))) if axes is None else tuple(int(a) % rank for a in axes)


# ----------------------------------------------------------------------------------------- the kernel


def _call(
    match: Attention,
    functions: dict[str, tuple[tvm.ir.GlobalVar, tirx.PrimFunc]],
    renamed: Callable[[relax.Expr], relax.Expr],
    as_numbers: Callable[[relax.Expr], relax.Expr],
) -> relax.Call:
    masks = [a for step in match.steps for a in step.args if _is_mask(a, match)]
    operands = [renamed(operand.tensor) for operand in match.operands]
    masks = [match.repeated.get(mask, mask) for mask in masks]
    operands += [as_numbers(mask) if tensor_dtype(mask) == "bool" else renamed(mask) for mask in masks]
    function = attention_function(match)
    key = function.script()
    if key not in functions:
        # tilings of a network share their functions: of equal names, equal bodies
        variable = tvm.ir.GlobalVar(f"attention_{content_number(key.encode())}")
        function = function.with_attr("global_symbol", variable.name_hint)
        relax.expr._update_type(variable, function.ty)
        functions[key] = variable, function
    result = relax.TensorType([int(e) for e in function.params[-1].shape], "float32")
    return relax.call_tir(functions[key][0], operands, result)


def _is_mask(operand: relax.Expr, match: Attention) -> bool:
    """Whether an operand is neither the scores nor a number."""
    if isinstance(operand, GenericConst):
        return operand.value.ndim > 0
    return not operand.same_as(match.scores) and operand not in match.members


def attention_function(match: Attention) -> tirx.PrimFunc:
    """Blocks scores, logits, peak, weights, total, context and result over query, key, value and masks."""
    query, key, value = (_placeholder(operand.shape) for operand in match.operands)
    *batch, rows, depth = (match.query.extent(axis) for axis in range(len(match.query.axes)))
    columns, width = match.key.extent(-1), match.value.extent(-1)
    d, t = sum_over(depth, "d"), sum_over(columns, "t")
    u, v = sum_over(columns, "u"), sum_over(columns, "v")

    def read(tensor: te.Tensor, operand: TransposedOperand, *indices: te.Var) -> te.Expr:
        return tensor[operand.indices(indices)]

    scores = te.compute(
        extents(*batch, rows, columns),
        lambda *i: te.sum(
            read(query, match.query, *i[:-1], d) * read(key, match.key, *i[:-2], d, i[-1]), axis=d
        ),
        name="scores",
    )
    logits, masks = _logits(match, scores)
    peak = te.compute(extents(*batch, rows), lambda *i: te.max(logits[(*i, t)], axis=t), name="peak")
    weights = te.compute(logits.shape, lambda *i: tirx.exp(logits[i] - peak[i[:-1]]), name="weights")
    total = te.compute(peak.shape, lambda *i: te.sum(weights[(*i, u)], axis=u), name="total")
    context = te.compute(
        extents(*batch, rows, width),
        lambda *i: te.sum(weights[(*i[:-1], v)] * read(value, match.value, *i[:-2], v, i[-1]), axis=v),
        name="context",
    )
    shape = [int(context.shape[a]) for a in match.result_axes]

    def normalised(*i: te.Var) -> te.Expr:
        placed = dict(zip(match.result_axes, i, strict=True))
        at = tuple(placed[a] for a in range(len(i)))
        quotient = context[at] / total[at[:-1]]
        zero = tirx.const(0, "float32")
        return tirx.Select(total[at[:-1]] > zero, quotient, zero) if match.hides_nan else quotient

    result = te.compute(extents(*shape), normalised, name="result")
    function = te.create_prim_func([query, key, value, *masks, result])
    return function.with_attr("op_pattern", int(Pattern.OPAQUE)).with_attr("tirx.noalias", True)


def _logits(match: Attention, scores: te.Tensor) -> tuple[te.Tensor, list[te.Tensor]]:
    masks: list[te.Tensor] = []
    operators = {"divide": tirx.div, "multiply": lambda a, b: a * b, "add": lambda a, b: a + b}
    operators["subtract"] = lambda a, b: a - b

    def operand(expr: relax.Expr, carried: te.Expr, i: Sequence[te.Var], used: list[te.Tensor]) -> te.Expr:
        if _is_number(expr):
            return tirx.const(float(expr.value.numpy()), "float32")
        if not _is_mask(expr, match):
            return carried
        mask = used.pop(0)
        rank = len(mask.shape)
        tail = zip(map(int, mask.shape), scores.shape[-rank:], i[len(i) - rank :], strict=True)
        return mask[tuple(_place(at, extent, int(whole)) for extent, whole, at in tail)]

    for step in match.steps:
        given = [a for a in step.args if _is_mask(a, match)]
        masks += [_placeholder(tensor_shape(match.repeated.get(a, a))) for a in given]

    def at(*i: te.Var) -> te.Expr:
        value, used = scores[i], list(masks)
        for step in match.steps:
            name = step.op.name.removeprefix("relax.")
            operands = [operand(arg, value, i, used) for arg in step.args]
            if name == "tanh":
                value = tirx.tanh(operands[0])
                continue
            *condition, a, b = operands
            if condition:
                value = tirx.Select(condition[0] != tirx.const(0.0, "float32"), a, b)
            else:
                value = a / b if name == "divide" else operators[name](a, b)
        return value

    return te.compute(scores.shape, at, name="logits"), masks


def _place(at: te.Var, extent: int, whole: int) -> te.Expr:
    """Along an axis of a mask, that of a score of so many: the only one, its own, or that of rows that come
    again."""
    if extent == 1:
        return tirx.IntImm("int64", 0)
    return at if extent == whole else at % tirx.IntImm("int64", extent)


def _placeholder(shape: Sequence[int]) -> te.Tensor:
    return te.placeholder(extents(*shape), "float32")
