"""Products of which a `split` takes the columns apart, as several products.

Queries, keys and values often come from one product. Cut by heads each of them has parts of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

import tvm
from tvm import relax, tirx

from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    is_op,
    part_name,
    substitute,
    tensor_shape,
    variables,
    weight_part,
)
from hybridc.passes.tiling.slice_rules import Slice, slice_of
from hybridc.passes.tiling.tile_sizes import TensorFacts


def split_products(program: Program, products: Collection[relax.Var]) -> tuple[Program, frozenset[str]]:
    """The program with a product for each part of those that only a `split` reads, perhaps behind
    element-wise operators; and the names of their weights.

    Requires: `program` canonical. Ensures: the same results up to rounding.
    """
    splitter = _Splitter(program, products)
    if splitter.splits:
        program = splitter.program_in_parts()
    return program, frozenset(splitter.made)


@dataclass
class _Splitter:
    program: Program
    products: Collection[relax.Var]
    facts: TensorFacts = field(init=False)
    builder: ProgramBuilder = field(init=False)
    new: dict[relax.Var, relax.Expr] = field(init=False)
    functions: dict[str, tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = field(init=False)
    splits: dict[relax.Var, relax.Call] = field(init=False)
    """Those that are replaced."""
    made: set[str] = field(default_factory=set)
    """Names of weights that are parts of others."""

    def __post_init__(self) -> None:
        self.facts = TensorFacts(self.program)
        self.builder = ProgramBuilder(self.program.inputs)
        self.functions = {g.name_hint: (g, f) for g, f in self.program.functions.items()}
        uses = Counter(var for b in self.program.bindings for var in variables(b.value))
        uses.update(var for output in self.program.outputs for var in variables(output))
        self.splits = {
            b.var: b.value
            for b in self.program.bindings
            if is_op(b.value, "split")
            if all(self._is_possible(b.value, span, uses) for span in _spans(b.value))
        }

    def _is_possible(self, split: relax.Call, span: tuple[int, int], uses: Counter[relax.Var]) -> bool:
        """Whether these indices of what is split are those of a product alone, which nothing else reads, or
        of what element-wise operators make of it and of weights."""
        var: relax.Expr = split.args[0]
        sliced: Slice | None = Slice(_axis(split), *span)
        while sliced is not None and isinstance(var, relax.Var) and uses[var] == 1:
            operation = self.facts.operations.get(var)
            rule = slice_of(operation, sliced.axis, sliced.begin, sliced.end)
            if operation is None or rule is None:
                return False
            if var in self.products:
                return True
            others = zip(operation.operands[1:], rule.slices[1:], strict=True)
            if not has_fact(operation.call, Fact.ELEMENTWISE) or not all(
                other is None or getattr(operand, "name", None) in self.program.weights
                for operand, other in others
            ):
                return False
            var, sliced = operation.operands[0], rule.slices[0]
        return False

    def program_in_parts(self) -> Program:
        self.new = dict(self.builder.take_parameters(self.program))
        for binding in self.program.bindings:
            value, origins = binding.value, self.program.origins[binding.var.name]
            if isinstance(value, relax.TupleGetItem) and value.tuple_value in self.splits:
                split = self.splits[value.tuple_value]
                sliced = Slice(_axis(split), *_spans(split)[value.index])
                self.new[binding.var] = self._sliced(split.args[0], sliced)
            elif binding.var not in self.splits:
                made = substitute(value, self.new.__getitem__)
                self.new[binding.var] = self.builder.emit(made, origins, binding.var.name)
        outputs = [substitute(output, self.new.__getitem__) for output in self.program.outputs]
        return self.builder.finish(outputs, dict(self.functions.values()))

    def _sliced(self, operand: relax.Expr, sliced: Slice | None) -> relax.Expr:
        """These indices of an operand alone: of a weight, a product, or what is computed of it."""
        if sliced is None or not isinstance(operand, relax.Var):
            return substitute(operand, self.new.__getitem__)
        weight = self.program.weights.get(operand.name)
        if weight is not None:
            taken = weight_part(weight, sliced.axis, sliced.begin, sliced.end)
            part = self.builder.weight(taken, part_name(operand, sliced.axis, sliced.begin, sliced.end))
            self.made.add(part.name)
            return part
        operation = self.facts.operations[operand]
        rule = slice_of(operation, sliced.axis, sliced.begin, sliced.end)
        assert operation is not None and rule is not None
        if rule.function is not None:
            variable, function = rule.function()
            self.functions[variable.name_hint] = variable, function
        operands = [self._sliced(*each) for each in zip(operation.operands, rule.slices, strict=True)]
        origins = self.program.origins[operand.name]
        return self.builder.emit(
            rule.make(operands, lambda expr: self.builder.emit(expr, origins, operand.name)),
            origins,
            operand.name,
        )


def _axis(split: relax.Call) -> int:
    return int(split.attrs.axis) % len(tensor_shape(split.args[0]))


def _spans(split: relax.Call) -> list[tuple[int, int]]:
    """Of the parts, along the axis of a split."""
    extent = tensor_shape(split.args[0])[_axis(split)]
    wanted = split.attrs.indices_or_sections
    if hasattr(wanted, "__len__"):
        cuts = [0, *map(int, wanted), extent]
    else:
        cuts = list(range(0, extent + 1, -(-extent // int(wanted))))
    return list(pairwise(cuts))
