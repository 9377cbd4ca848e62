"""Fuse: element-wise operators join the operator whose result they use; one PrimFunc per distinct group.

Time is linear in the number of operators. Each distinct operator is legalised once, each distinct group
is composed once, in a module of its own size; TVM's `FuseOps` and `FuseTIR` on the whole graph are
superlinear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tvm
from tvm import relax, tirx
from tvm.ir.expr import GenericConst

from hybridc.errors import ModelError
from hybridc.passes.program.choices import conditions_of_choices, is_choice
from hybridc.passes.program.means import is_mean_of_ranks
from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.prim_funcs import FunctionTable, OperatorFacts, origins_of
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    constant_name,
    is_op,
    operator_name,
    tensor_dtype,
    tensor_shape,
    variables,
)
from hybridc.schedules.annotation import Pattern

MAX_GROUP = 32
"""Operators in one kernel; longer chains gain nothing more and only slow compilation."""

MAX_READS = 128
"""Operands that the expression of a kernel may name. A value that is read twice stands in it twice, so in a
chain of values that are read twice it doubles with each. Four times what `MAX_GROUP` operators of two
operands name if nothing is read twice, so that ordinary kernels stay as they are."""

FactsOf = Callable[[relax.VarBinding, Program], OperatorFacts]
"""How a binding computes its result."""

ANCHORS = (Pattern.INJECTIVE, Pattern.REDUCTION, Pattern.OUT_ELEMENTWISE_FUSABLE)
"""Patterns to which an element-wise epilogue may be attached."""


@dataclass(slots=True)
class Group:
    """Bindings, by position, that become one kernel; the last one gives its result."""

    members: list[int]
    pattern: Pattern
    anchors: set[int]
    """Members that are not element-wise; their inputs are never fused into the kernel."""

    @property
    def last(self) -> int:
        """The member that gives the result."""
        return self.members[-1]


@dataclass(frozen=True, slots=True)
class Uses:
    """Who reads whose result, by position: hashing and walking TVM's objects again and again is slow."""

    position: dict[relax.Var, int]
    """Of the binding that computes a variable."""
    operands: list[list[int | None]]
    """Of each binding the positions that it reads, with repeats; None for an input or a weight."""
    readers: list[set[int]]
    """Of each binding the positions that read it; -1 where it is an output of the network."""
    conditions: frozenset[int]
    """The bindings that compute conditions of choices."""

    @classmethod
    def of(cls, program: Program) -> Uses:
        """Linear in the bindings and their operands."""
        position = {binding.var: i for i, binding in enumerate(program.bindings)}
        operands = [[position.get(v) for v in variables(binding.value)] for binding in program.bindings]
        readers: list[set[int]] = [set() for _ in operands]
        outputs = [position.get(v) for output in program.outputs for v in variables(output)]
        for i, read in [*enumerate(operands), (-1, outputs)]:
            for at in read:
                if at is not None:
                    readers[at].add(i)
        conditions = frozenset(position[v] for v in conditions_of_choices(program) if v in position)
        return cls(position, operands, readers, conditions)

    def is_read_once(self, var: relax.Expr) -> bool:
        """Whether a binding computes the variable, and one other alone reads it."""
        at = self.position.get(var) if isinstance(var, relax.Var) else None
        return at is not None and len(self.readers[at]) == 1


def fuse(program: Program, functions: FunctionTable | None = None) -> Program:
    """Replace operators by calls of distinct PrimFuncs.

    Requires: `main` canonical; functions that it calls already are named after what they compute, if
    `functions` has those of other programs.
    Ensures: every binding is a `call_tir`, a view or the projection of a tuple; PrimFuncs are
    structurally distinct by (operators, shapes, which arguments are weights). Programs fused with the same
    `functions` share them, and weights of one name are equal.
    Raises: ModelError HC150 for an operator that has no TensorIR.
    """
    functions = functions if functions is not None else FunctionTable()
    return _emit(program, form_groups(program, functions.facts), functions)


def refused_operators(program: Program) -> tuple[ModelError, ...]:
    """What `fuse` raises, of every operator by itself."""
    functions = FunctionTable()
    found: list[ModelError] = []
    for binding in program.bindings:
        if not isinstance(binding.value, relax.Call) or has_fact(binding.value, Fact.VIEW):
            continue
        try:
            functions.facts(binding, program)
            functions.function([binding], program)
        except ModelError as error:
            found.append(error)
    return tuple(found)


# ------------------------------------------------------------------------------------------ grouping


def form_groups(program: Program, facts_of: FactsOf) -> list[Group]:
    """Groups in the order of their last members, which is an executable order.

    A producer joins its consumer only if all readers of its result are in that group; so no path leaves
    the group and comes back, and the groups cannot form a cycle.
    """
    uses = Uses.of(program)
    bindings = program.bindings
    group_of: dict[int, Group] = {}
    facts_at: list[OperatorFacts] = []
    for i, binding in enumerate(bindings):
        facts = _facts(binding, program, facts_of)
        facts_at.append(facts)
        group = Group([i], facts.pattern, {i} if facts.pattern > Pattern.BROADCAST else set())
        group_of[i] = group
        for producer in _joinable_producers(group, bindings, uses, group_of, facts_at):
            group.members = sorted(producer.members + group.members)
            group.pattern = max(group.pattern, producer.pattern)
            group.anchors |= producer.anchors
            group_of.update((member, group) for member in producer.members)
    distinct = {id(group): group for group in group_of.values()}
    return sorted(distinct.values(), key=lambda group: group.last)


def _facts(binding: relax.VarBinding, program: Program, facts_of: FactsOf) -> OperatorFacts:
    # a choice stays a kernel of its own: of which of its operands it needs; so does what ranks make together
    value = binding.value
    if not isinstance(value, relax.Call) or has_fact(value, Fact.VIEW):
        return OperatorFacts(Pattern.OPAQUE)
    if is_choice(value) or is_mean_of_ranks(value):
        return OperatorFacts(Pattern.OPAQUE)
    return facts_of(binding, program)


def _joinable_producers(
    group: Group,
    bindings: list[relax.VarBinding],
    uses: Uses,
    group_of: dict[int, Group],
    facts_at: list[OperatorFacts],
) -> Iterator[Group]:
    """Producers that the caller merges into `group` before it asks for the next one; the nearest first."""
    call = bindings[group.last].value
    if is_op(call, "matmul"):
        yield from _transposed_weight(call, bindings, uses, group_of)
    if has_fact(call, Fact.CONVOLUTION):
        yield from _halos(call, bindings, uses, group_of)
    if group.pattern > Pattern.BROADCAST:
        return
    shape = _shape_or_none(bindings[group.last].var)
    progress = True
    while progress:
        progress = False
        open_members = [m for m in group.members if not _is_widened_later(m, bindings, uses, facts_at)]
        inputs = {at for m in open_members for at in uses.operands[m] if at is not None}
        for at in sorted(inputs, reverse=True):
            producer = group_of[at]
            if producer is group or producer.last != at:
                continue
            if len(group.members) + len(producer.members) > MAX_GROUP:
                continue
            fits = producer.pattern <= Pattern.BROADCAST or (
                producer.pattern in ANCHORS
                and group.pattern <= Pattern.BROADCAST
                # a condition is computed on the host: what it is computed from need not come there
                and group.last not in uses.conditions
            )
            inside = uses.readers[at] <= set(group.members) - group.anchors
            if not (fits and inside and _shape_or_none(bindings[at].var) == shape):
                continue
            if _is_short(group, producer, uses, facts_at):
                yield producer
                progress = True
                break


def _is_widened_later(
    at: int, bindings: list[relax.VarBinding], uses: Uses, facts_at: list[OperatorFacts]
) -> bool:
    """Whether a binding makes floats of 8-bit numbers, and another kernel stands between theirs and it.

    They then wait in memory as bytes, and what reads the floats makes them.
    """
    call = bindings[at].value
    if not is_op(call, "astype") or tensor_dtype(call.args[0]) not in ("uint8", "int8"):
        return False
    source = uses.position.get(call.args[0], at)
    return any(facts.pattern in ANCHORS for facts in facts_at[source + 1 : at])


def _is_short(group: Group, producer: Group, uses: Uses, facts_at: list[OperatorFacts]) -> bool:
    """Whether the expression of both groups together names few operands, each as often as it stands there."""
    reads: dict[int | None, int] = {}
    for i in sorted(producer.members + group.members):
        operands = uses.operands[i]
        # the result of an anchor is computed once, and then read
        is_anchor = i in producer.anchors or i in group.anchors
        named = sum(reads.get(operand, 1) for operand in operands)
        reads[i] = 1 if is_anchor else facts_at[i].reads * max(named, 1)
    return reads[group.last] <= MAX_READS


def _shape_or_none(var: relax.Var) -> tuple[int, ...] | None:
    return tensor_shape(var) if isinstance(var.ty, relax.TensorType) else None


def _transposed_weight(
    call: relax.Call,
    bindings: list[relax.VarBinding],
    uses: Uses,
    group_of: dict[int, Group],
) -> Iterator[Group]:
    """The transpose of a weight that is also read untransposed (tied embeddings), or that is an input because
    it is trained, is done by the matmul: else every run would write the transposed weight.
    """
    weight = call.args[1]
    if not uses.is_read_once(weight):
        return
    transpose = bindings[uses.position[weight]].value
    if is_op(transpose, "permute_dims") and transpose.args[0] not in uses.position:
        yield group_of[uses.position[weight]]


def _halos(
    call: relax.Call,
    bindings: list[relax.VarBinding],
    uses: Uses,
    group_of: dict[int, Group],
) -> Iterator[Group]:
    """A convolution of a tile reads the border rows of the neighbouring tiles in place (stage `tile`)."""

    def is_halo(var: relax.Expr) -> bool:
        value = bindings[uses.position[var]].value if uses.is_read_once(var) else None
        return isinstance(value, relax.Call) and operator_name(value) == "halo"

    data, position = call.args[0], uses.position
    if is_halo(data):
        yield group_of[position[data]]
    elif uses.is_read_once(data):
        joined = bindings[position[data]].value
        parts = [var for var in variables(joined) if is_halo(var)] if is_op(joined, "concat") else []
        if parts:
            yield group_of[position[data]]
            yield from (group_of[position[var]] for var in dict.fromkeys(parts))


# ------------------------------------------------------------------------------------------ emission


def _emit(program: Program, groups: list[Group], functions: FunctionTable) -> Program:
    bindings = program.bindings
    builder = ProgramBuilder(program.inputs)
    new = builder.take_parameters(program)

    def renamed(expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, GenericConst) and expr not in new:
            value = expr.value.numpy()
            new[expr] = builder.weight(value, constant_name(value))
        return relax.Tuple([renamed(i) for i in expr.fields]) if isinstance(expr, relax.Tuple) else new[expr]

    called: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
    for group in groups:
        members = [bindings[i] for i in group.members]
        last = members[-1]
        origins = origins_of(members, program)
        if isinstance(last.value, relax.TupleGetItem):
            value = relax.TupleGetItem(renamed(last.value.tuple_value), last.value.index)
            new[last.var] = builder.emit(value, origins, f"{value.tuple_value.name}_{value.index}")
        elif has_fact(last.value, Fact.VIEW):
            view = relax.op.reshape(renamed(last.value.args[0]), tensor_shape(last.var))
            new[last.var] = builder.emit(view, origins, "view")
        else:
            function, arguments = functions.function(members, program)
            called[function] = functions.functions[function]
            results = list(last.var.ty.fields) if isinstance(last.var.ty, relax.TupleType) else last.var.ty
            call = relax.call_tir(function, [renamed(a) for a in arguments], results)
            new[last.var] = builder.emit(call, origins, _hint(group, bindings))
    return builder.finish([renamed(output) for output in program.outputs], called)


def _hint(group: Group, bindings: list[relax.VarBinding]) -> str:
    """Name a result after the operator that determines the kernel's cost: the last before the epilogue."""
    return operator_name(bindings[max(group.anchors, default=group.members[0])].value)
