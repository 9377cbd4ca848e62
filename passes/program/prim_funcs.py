"""Distinct PrimFuncs: each operator is legalised once, each distinct group composed once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import tvm
from tvm import relax, s_tir, tirx
from tvm.ir.expr import GenericConst
from tvm_ffi import structural_hash, structural_walk

from hybridc.checks import markers, numbered
from hybridc.errors import ModelError
from hybridc.passes.program.choices import CHOICE, is_choice
from hybridc.passes.program.legalize import LEGALIZATIONS, UNMARKED, Legalize, is_checked
from hybridc.passes.program.means import MEAN_OF_RANKS, is_mean_of_ranks
from hybridc.passes.program.nan_semantics import with_infinite_bounds, with_propagated_nan
from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import Program, is_op, operator_name, tensor_dtype, tensor_shape
from hybridc.schedules.annotation import Pattern

NO_KERNEL = "HC150"
"""Code of the error of a node that no kernel can be made of."""

_SHAPE = re.compile(r"\((?:\d+, )*\d+,?\)|R\.shape\(\[[\d, ]+\]\)")
"""In the key of an operator: of a tensor, or as an operand."""
_EXTENT = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """How an operator computes its result."""

    pattern: Pattern
    reads: int = 1
    """Of an element-wise operator: how often the expression for one element names an operand. `gelu(x)`
    names x twice, so in a chain of them the first operand stands there 2**length times."""


@dataclass
class FunctionTable:
    """Distinct PrimFuncs by what they compute, and the pattern of each distinct operator."""

    by_key: dict[str, tuple[tvm.ir.GlobalVar, tuple[int, ...]]] = field(default_factory=dict)
    """The function of a key, and which of the group's arguments each of its parameters takes."""
    functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    """Names in use."""
    _facts: dict[str, OperatorFacts] = field(default_factory=dict)

    def facts(self, binding: relax.VarBinding, program: Program) -> OperatorFacts:
        """What fusion asks about one operator; OPAQUE where TVM has no single PrimFunc for it."""
        described, _ = _describe([binding], program)
        key = _without_extents(described)
        if key not in self._facts:
            # of TVM's own function: TVM takes a marker in an index for a call that does anything
            legal = _legalize([binding], [], program, UNMARKED)
            legal = relax.transform.AnnotateTIROpPattern()(legal)
            found = [f for f in legal.functions.values() if isinstance(f, tirx.PrimFunc)]
            single = len(found) == 1 and isinstance(binding.var.ty, relax.TensorType)
            pattern = Pattern(int(found[0].attrs["op_pattern"])) if single else Pattern.OPAQUE
            simple = pattern <= Pattern.BROADCAST
            self._facts[key] = OperatorFacts(pattern, _growth(found[0])) if simple else OperatorFacts(pattern)
        return self._facts[key]

    def function(
        self, members: list[relax.VarBinding], program: Program
    ) -> tuple[tvm.ir.GlobalVar, list[relax.Expr]]:
        """The function of a group and the arguments to call it with."""
        key, arguments = _describe(members, program)
        key += _describe_checks(members, program)
        if key not in self.by_key:
            name = self._name(members)
            function, order = _compose(members, arguments, program)
            variable = tvm.ir.GlobalVar(name)
            relax.expr._update_type(variable, function.ty)
            if is_choice(members[-1].value):
                # a condition may be one of the operands, too
                named = [arguments.index(argument) for argument in members[-1].value.args[1].fields]
                function = function.with_attr(CHOICE, [order.index(position) for position in named])
            if is_mean_of_ranks(members[-1].value):
                function = function.with_attr(MEAN_OF_RANKS, True)
            self.by_key[key] = variable, order
            self.functions[variable] = function.with_attr("global_symbol", name)
        variable, order = self.by_key[key]
        return variable, [arguments[i] for i in order]

    def _name(self, members: list[relax.VarBinding]) -> str:
        operators = [operator_name(m.value) for m in members]
        stem = "_".join(dict.fromkeys(operators))[:48].rstrip("_")
        name, i = stem, 0
        while name in self.names:
            i += 1
            name = f"{stem}_{i}"
        self.names.add(name)
        return name


def _growth(function: tirx.PrimFunc) -> int:
    """How often the result, written as one expression, names the parameter that it names most often."""
    blocks: list[s_tir.SBlock] = []
    structural_walk(function.body, (s_tir.SBlock, blocks.append))
    named: dict[tirx.Var, Counter[tirx.Var]] = {p: Counter({p: 1}) for p in function.params}
    for block in blocks:
        if not block.iter_vars:
            continue
        loads: list[tvm.ir.TensorLoad] = []
        structural_walk(block.body, (tvm.ir.TensorLoad, loads.append))
        total: Counter[tirx.Var] = Counter()
        for load in loads:
            total.update(named.get(load.source, {}))
        for write in block.writes:
            named[write.source] = total
    return max((max(counts.values(), default=1) for counts in named.values()), default=1)


def _describe(members: list[relax.VarBinding], program: Program) -> tuple[str, list[relax.Expr]]:
    """A key that is equal for groups that compute the same function, and the group's arguments."""
    arguments: list[relax.Expr] = []
    labels: dict[object, str] = {m.var: f"%{i}" for i, m in enumerate(members)}

    def describe(expr: relax.Expr, literal: bool = False) -> str:
        if isinstance(expr, relax.Tuple):
            return f"({','.join(describe(item) for item in expr.fields)})"
        if literal and _is_scalar(expr):
            return f"{expr.value.dtype}={expr.value.numpy()!r}"
        if isinstance(expr, tvm.ir.GlobalVar):
            # the importer's names tell apart functions of one program only
            return f"{expr.name_hint}:{structural_hash(program.module[expr])}"
        if not isinstance(expr, relax.Var | GenericConst):
            return str(expr)
        if expr not in labels:
            kind = "weight" if isinstance(expr, GenericConst) or expr.name in program.weights else "tensor"
            labels[expr] = f"${len(arguments)}"
            arguments.append(expr)
            return f"{labels[expr]}:{kind}:{tensor_dtype(expr)}{tensor_shape(expr)}"
        return labels[expr]

    lines = [
        f"{m.value.op.name}({','.join(describe(a, _takes_literals(m.value)) for a in m.value.args)})"
        f"{m.value.attrs}{m.var.ty}"
        for m in members
    ]
    return "\n".join(lines), arguments


def _without_extents(key: str) -> str:
    """The key of an operator with numbers in place of extents, equal ones where these are, but for 0 and 1.

    How an operator computes its result depends on no more, and is so asked once for all buckets of sizes.
    """
    numbers = {"0": "0", "1": "1"}

    def number(extent: re.Match[str]) -> str:
        return numbers.setdefault(extent[0], f"n{len(numbers)}")

    return _SHAPE.sub(lambda shape: _EXTENT.sub(number, shape[0]), key)


def _describe_checks(members: list[relax.VarBinding], program: Program) -> str:
    """Which members come from one ONNX node, where it matters: a function says by position whose check
    fails."""
    if not any(is_checked(m.value) or _markers_called(m.value, program) for m in members):
        return ""
    return f"\norigins {_origin_positions(members, program)}"


def _markers_called(call: relax.Call, program: Program) -> list[tvm.ir.Call]:
    return markers(program.module[call.args[0]].body) if is_op(call, "call_tir") else []


def _origin_positions(members: list[relax.VarBinding], program: Program) -> list[int]:
    """Of each member the position of its ONNX node among those of the group."""
    origins = origins_of(members, program)
    own = [program.origins.get(m.var.name, ())[:1] for m in members]
    return [origins.index(names[0]) if names else 0 for names in own]


def _is_scalar(expr: relax.Expr) -> bool:
    return isinstance(expr, GenericConst) and expr.value.ndim == 0


def _takes_literals(call: relax.Call) -> bool:
    """Whether legalisation writes scalar constants into the kernel, so that they are no arguments."""
    return has_fact(call, Fact.LITERAL) and not all(map(_is_scalar, call.args))


def _legalize(
    members: list[relax.VarBinding],
    arguments: list[relax.Expr],
    program: Program,
    own: Mapping[str, Legalize] = LEGALIZATIONS,
) -> tvm.IRModule:
    """A module whose `main` consists of the group, its operators replaced by calls of PrimFuncs.

    `own` are ways to lower operators that replace TVM's.
    """
    if not arguments:
        _, arguments = _describe(members, program)
    parameters = [relax.Var(f"p{i}", a.ty) for i, a in enumerate(arguments)]
    new: dict[relax.Expr, relax.Expr] = dict(zip(arguments, parameters, strict=True))

    def rename(expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([rename(item) for item in expr.fields])
        return new.get(expr, expr)

    normalizer = relax.BlockBuilder()
    bindings = []
    for i, member in enumerate(members):
        call = member.value
        value = normalizer.normalize(
            relax.Call(call.op, [rename(a) for a in call.args], call.attrs, call.ty_args)
        )
        new[member.var] = relax.Var(f"v{i}", value.ty)
        bindings.append(relax.VarBinding(new[member.var], value))
    result = new[members[-1].var]
    main = relax.Function(parameters, relax.SeqExpr([relax.BindingBlock(bindings)], result), result.ty)
    called = {m.value.args[0]: program.module[m.value.args[0]] for m in members if is_op(m.value, "call_tir")}
    module = tvm.IRModule({**called, tvm.ir.GlobalVar("main"): main.with_attr("global_symbol", "main")})
    with _fault(members, program):
        return relax.transform.LegalizeOps(dict(own))(module)


def _compose(
    members: list[relax.VarBinding], arguments: list[relax.Expr], program: Program
) -> tuple[tirx.PrimFunc, tuple[int, ...]]:
    """One PrimFunc for the group, and which argument each of its parameters takes; results come last."""
    legal = _legalize(members, arguments, program)
    body = legal["main"]
    calls = [b.value for block in body.body.blocks for b in block.bindings]
    if not calls or not all(is_op(call, "call_tir") for call in calls):
        raise _unsupported(members, program, "")
    group = tvm.ir.GlobalVar("group")
    primitive = body.without_attr("global_symbol").with_attr("Primitive", 1)
    relax.expr._update_type(group, primitive.ty)
    parameters = [relax.Var(p.name, p.ty) for p in body.params]
    call = relax.BlockBuilder().normalize(relax.Call(group, parameters))
    result = relax.Var("result", call.ty)
    block = relax.BindingBlock([relax.VarBinding(result, call)])
    caller = relax.Function(parameters, relax.SeqExpr([block], result), result.ty)
    functions = {g: f for g, f in legal.functions.items() if g.name_hint != "main"}
    functions[group] = primitive
    functions[tvm.ir.GlobalVar("main")] = caller.with_attr("global_symbol", "main")
    with _fault(members, program):
        fused = relax.transform.FuseTIR()(tvm.IRModule(functions))
    [binding] = [b for block in fused["main"].body.blocks for b in block.bindings]
    callee, taken = binding.value.args[:2]
    positions = {p.name: i for i, p in enumerate(fused["main"].params)}
    function = with_propagated_nan(with_infinite_bounds(fused[callee]))
    function = numbered(function, _marker_origins(members, legal, program))
    return function, tuple(positions[argument.name] for argument in taken.fields)


def _marker_origins(members: list[relax.VarBinding], legal: tvm.IRModule, program: Program) -> list[int]:
    """Of each marker of a composed function the position of its ONNX node among those of the group."""
    positions, found, member = _origin_positions(members, program), [], 0
    for block in legal["main"].body.blocks:
        for binding in block.bindings:
            count = len(markers(legal[binding.value.args[0]].body))
            found += [positions[member]] * count
            # the last call of a member has its name
            member += binding.var.name == f"v{member}"
    return found


class _fault:
    """Turns TVM's failure to compile a group into an error that names the ONNX node."""

    def __init__(self, members: list[relax.VarBinding], program: Program) -> None:
        self.members, self.program = members, program

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            text = str(error).strip().splitlines()
            raise _unsupported(self.members, self.program, text[-1] if text else "") from error


def _unsupported(members: list[relax.VarBinding], program: Program, why: str) -> ModelError:
    operators = ", ".join(dict.fromkeys(operator_name(m.value) for m in members))
    nodes = ", ".join(origins_of(members, program))
    what = f"no kernel can be made for {operators}" + (f": {why}" if why else "")
    return ModelError(
        NO_KERNEL, what, where=f"node {nodes}", remedy="replace the operator or fix its attributes"
    )


def origins_of(members: Iterable[relax.VarBinding], program: Program) -> list[str]:
    """The ONNX nodes that these bindings compute, each once."""
    return list(dict.fromkeys(o for m in members for o in program.origins.get(m.var.name, ())))
