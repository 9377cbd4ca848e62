"""Bring an imported function into the form that every pass relies on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from hybridc.errors import ModelError
from hybridc.frontend import codes
from hybridc.frontend.importer import Emitted
from hybridc.frontend.names import safe_names
from hybridc.frontend.shape_folding import fold_shape


@dataclass(frozen=True, slots=True)
class NormalForm:
    """`main` as `ImportedModel` describes it."""

    module: tvm.IRModule
    weights: Mapping[str, np.ndarray]
    outputs: tuple[relax.Var, ...]
    origins: Mapping[str, tuple[str, ...]]


def normal_form(emitted: Emitted, name: str, refusals: codes.Refusals) -> NormalForm:
    """Resolve aliases and tuples, make tensors parameters, drop what is unused; linear in the bindings.

    Refuses ModelError HC117 where the shape of a value that is needed depends on data; raises the first
    refusal that is noted.
    """
    return _Normalizer(emitted, name, refusals).run()


class _Normalizer:
    def __init__(self, emitted: Emitted, name: str, refusals: codes.Refusals) -> None:
        self.emitted, self.name, self.refusals = emitted, name, refusals
        self.weights = dict(emitted.weights)
        self.resolved: dict[relax.Var, relax.Expr] = {}
        self.hoisted: dict[tvm.ir.GenericConst, relax.Var] = {}
        self.taken = {v.name for v in emitted.inputs} | set(self.weights)
        self.functions = _numbered(emitted.module)

    def run(self) -> NormalForm:
        kept = self._resolve_aliases()
        outputs = [self._resolve_output(value) for value in self.emitted.outputs]
        kept = _without_dead(kept, outputs)
        self._refuse_unknown_shapes(kept)
        bindings, origins, renamed = self._rebuild(kept, outputs)
        results = tuple(renamed.get(value, value) for value in outputs)
        used = {v for binding in bindings for v in _variables(binding.value)} | set(results)
        weights = {n: entry for n, entry in self.weights.items() if entry[0] in used}
        parameters = [*self.emitted.inputs, *(variable for variable, _ in weights.values())]
        module = self._module(parameters, bindings, results)
        return NormalForm(module, {n: array for n, (_, array) in weights.items()}, results, origins)

    def _resolve_aliases(self) -> list[tuple[relax.Var, relax.Expr, str]]:
        """Bindings that compute something, their operands resolved."""
        kept = []
        for binding, origin in self.emitted.bindings:
            if isinstance(binding, relax.MatchCast):
                self.refusals.add(self._data_dependent(origin))
            value = fold_shape(self._substitute(binding.value))
            if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
                value = value.tuple_value.fields[value.index]
            if isinstance(value, (relax.Var, relax.Tuple, relax.ShapeExpr, tvm.ir.GenericConst)):
                self.resolved[binding.var] = value
            else:
                kept.append((binding.var, value, origin))
        return kept

    def _substitute(self, value: relax.Expr) -> relax.Expr:
        """The value with aliases followed, and functions by their names in the result."""
        if isinstance(value, relax.Var):
            return self.resolved.get(value, value)
        if isinstance(value, tvm.ir.GlobalVar):
            return self.functions.get(value, value)
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._substitute(field) for field in value.fields])
        if isinstance(value, relax.TupleGetItem):
            return relax.TupleGetItem(self._substitute(value.tuple_value), value.index)
        if isinstance(value, tvm.ir.Call):
            return _call(value, [self._substitute(arg) for arg in value.args])
        return value

    def _hoist_constants(self, value: relax.Expr) -> relax.Expr:
        """The value with tensor constants replaced by parameters: constants cannot be planned."""
        if isinstance(value, tvm.ir.GenericConst):
            return value if value.value.ndim == 0 else self._hoist(value)
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._hoist_constants(field) for field in value.fields])
        if isinstance(value, tvm.ir.Call):
            return _call(value, [self._hoist_constants(arg) for arg in value.args])
        return value

    def _hoist(self, constant: tvm.ir.GenericConst) -> relax.Var:
        """The weight parameter that replaces a constant."""
        if constant not in self.hoisted:
            array = constant.value.numpy()
            (identifier,) = safe_names(["constant"], self.taken).values()
            self.taken.add(identifier)
            variable = relax.Var(identifier, relax.TensorType(array.shape, str(array.dtype)))
            self.hoisted[constant] = variable
            self.weights[identifier] = (variable, array)
        return self.hoisted[constant]

    def _resolve_output(self, value: relax.Expr) -> relax.Var:
        value = self._substitute(value)
        if isinstance(value, tvm.ir.GenericConst):
            value = self._hoist(value)
        if not isinstance(value, relax.Var):
            raise self._data_dependent("")
        return value

    def _rebuild(
        self, kept: list[tuple[relax.Var, relax.Expr, str]], outputs: list[relax.Var]
    ) -> tuple[list[relax.VarBinding], dict[str, tuple[str, ...]], dict[relax.Var, relax.Var]]:
        """Bindings with distinct safe names; only outputs are visible outside the dataflow block."""
        visible = set(outputs)
        self.resolved = {}
        bindings: list[relax.VarBinding] = []
        origins: dict[str, tuple[str, ...]] = {}
        names = _distinct([variable.name for variable, _, _ in kept], self.taken)
        for (variable, value, origin), identifier in zip(kept, names, strict=True):
            make = relax.Var if variable in visible else relax.DataflowVar
            fresh = make(identifier, variable.ty)
            bindings.append(relax.VarBinding(fresh, self._hoist_constants(self._substitute(value))))
            origins[identifier] = (origin,)
            self.resolved[variable] = fresh
        return bindings, origins, self.resolved

    def _refuse_unknown_shapes(self, kept: list[tuple[relax.Var, relax.Expr, str]]) -> None:
        """Of bindings whose shapes are not known those whose operands' are: the others follow from them."""
        unknown = set[relax.Var]()
        for variable, value, origin in kept:
            if not _is_static(variable.ty):
                if unknown.isdisjoint(_variables(value)):
                    self.refusals.add(self._data_dependent(origin))
                unknown.add(variable)
        self.refusals.stop()

    def _module(
        self, parameters: list[relax.Var], bindings: list[relax.VarBinding], results: tuple[relax.Var, ...]
    ) -> tvm.IRModule:
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], relax.Tuple(results))
        main = relax.Function(parameters, body, relax.TupleType([v.ty for v in results]))
        main = main.with_attr("global_symbol", "main").with_attr("num_input", len(self.emitted.inputs))
        called = {v for b in bindings for v in _called(b.value)}
        functions = {
            self.functions.get(v, v): f
            for v, f in self.emitted.module.functions.items()
            if self.functions.get(v, v) in called
        }
        return relax.transform.Normalize()(tvm.IRModule({**functions, tvm.ir.GlobalVar("main"): main}))

    def _data_dependent(self, origin: str) -> ModelError:
        return ModelError(
            codes.DATA_DEPENDENT_SHAPE,
            "the shape of a value depends on data, or the value is not a tensor",
            where=f"{self.name}: node {origin!r}" if origin else self.name,
            remedy="export the network without it: every shape must follow from the shapes of the inputs, and"
            " from inputs that --value makes constant",
        )


def _without_dead(
    kept: list[tuple[relax.Var, relax.Expr, str]], outputs: list[relax.Var]
) -> list[tuple[relax.Var, relax.Expr, str]]:
    """Bindings that an output needs."""
    needed = set(outputs)
    live = []
    for variable, value, origin in reversed(kept):
        if variable in needed:
            needed.update(_variables(value))
            live.append((variable, value, origin))
    return live[::-1]


def _call(call: tvm.ir.Call, args: list[relax.Expr]) -> relax.Expr:
    return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)


def _variables(value: relax.Expr) -> list[relax.Var]:
    """Variables that a normalised value reads."""
    if isinstance(value, relax.Var):
        return [value]
    if isinstance(value, relax.Tuple):
        return [v for field in value.fields for v in _variables(field)]
    if isinstance(value, relax.TupleGetItem):
        return _variables(value.tuple_value)
    if isinstance(value, tvm.ir.Call):
        return [v for arg in value.args for v in _variables(arg)]
    return []


def _called(value: relax.Expr) -> list[tvm.ir.GlobalVar]:
    """Functions of the module that a value calls."""
    if not isinstance(value, tvm.ir.Call):
        return []
    return [v for v in (value.op, *value.args) if isinstance(v, tvm.ir.GlobalVar)]


def _numbered(module: tvm.IRModule) -> dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar]:
    """New names of functions that TVM has numbered: `pad_1` for `pad1`, which tells the number from a name's
    own digits, as of `resize1d`."""
    names = {v.name_hint for v in module.get_global_vars()}
    renamed = {}
    for old in module.get_global_vars():
        base = old.name_hint.rstrip("0123456789")
        if base != old.name_hint and base in names:
            new = tvm.ir.GlobalVar(f"{base}_{old.name_hint.removeprefix(base)}")
            relax.expr._update_type(new, module[old].ty)
            renamed[old] = new
    return renamed


def _is_static(type_: relax.Type) -> bool:
    if isinstance(type_, relax.TupleType):
        return all(_is_static(field) for field in type_.fields)
    if not isinstance(type_, relax.TensorType) or not isinstance(type_.shape, relax.ShapeExpr):
        return False
    return all(isinstance(dim, tvm.tirx.IntImm) for dim in type_.shape)


def _distinct(names: list[str], taken: set[str]) -> list[str]:
    """Safe names in order. The names are distinct already: the importer's BlockBuilder saw to it."""
    chosen = safe_names(names, taken)
    return [chosen[name] for name in names]
