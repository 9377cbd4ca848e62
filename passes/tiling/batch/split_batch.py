"""A training step whose kernels are too large is split into micro-batches.

Every tensor that has the samples of the batch along an axis becomes several tensors, its *tiles*, one for
each micro-batch, and every operator that treats samples one by one becomes calls on tiles. What sums over the
batch, a gradient of a parameter or the statistics of BatchNorm, becomes a sum per micro-batch, and these are
added up; kernels that read the sum wait for all of them.

All that can be computed for one micro-batch is computed before the next one begins, so that few tiles are
live at a time: without BatchNorm its whole forward and backward pass, as in gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax, tirx
from tvm.ir.expr import GenericConst

from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    content_number,
    part_name,
    substitute,
    tensor_shape,
    variables,
    weight_part,
)
from hybridc.passes.tiling.batch.functions import SUM, BatchFunction, Label, unnumbered
from hybridc.passes.tiling.batch.network import BatchNetwork, samples_of
from hybridc.passes.tiling.batch.statistics import statistics_apart
from hybridc.passes.tiling.limits import MAX_CALLS, MAX_TILES, UNREACHABLE_LIMIT_SLACK
from hybridc.passes.tiling.working_set import KernelGroup, kernel_groups, size_bytes


def split_batch(program: Program, limit_bytes: int) -> Program:
    """Split a step into the fewest micro-batches with which the working sets of kernels are within the limit.

    Requires: `main` canonical.
    Ensures: the same results up to rounding, inputs and outputs as they were; the program itself where
    nothing sums over its batch, or no kernel that depends on the batch exceeds the limit.
    """
    samples = samples_of(program)
    if samples is None:
        return program
    groups = kernel_groups(program)
    if all(group.size_bytes <= limit_bytes for group in groups):
        return program
    network = BatchNetwork(statistics_apart(program, samples), samples)
    if not any(rule.label == SUM for rule in network.rules.values()):
        return program
    count = _fewest_micro_batches(network, kernel_groups(network.program), limit_bytes)
    return program if count == 1 else _MicroBatchEmitter(network, count).emitted()


# ------------------------------------------------------------------------------------ how many micro-batches


def _fewest_micro_batches(network: BatchNetwork, groups: Sequence[KernelGroup], limit_bytes: int) -> int:
    """The fewest equal micro-batches with which no kernel that depends on the batch exceeds the limit.

    Nor need they be smaller than what does not depend on it: a parameter's update is as large as it must be.
    """
    others = max((g.size_bytes for g in groups if g.result not in network.rules), default=0)
    limit_bytes = max(limit_bytes, others)
    large = [g for g in groups if g.size_bytes > limit_bytes and g.result in network.rules]
    most = min(MAX_TILES, MAX_CALLS // max(len(network.rules), 1))
    counts = [n for n in range(2, min(most, network.samples) + 1) if network.samples % n == 0]
    if not large or not counts:
        return 1

    def needed(group: KernelGroup, count: int) -> int:
        return sum(
            size_bytes(v)
            // (count if network.axis(v) is not None or isinstance(network.labels.get(v), tuple) else 1)
            for v in (*group.inputs, group.result)
        )

    goals = [max(limit_bytes, int(UNREACHABLE_LIMIT_SLACK * needed(group, counts[-1]))) for group in large]
    fits = (n for n in counts if all(needed(g, n) <= goal for g, goal in zip(large, goals, strict=True)))
    return next(fits)


# ------------------------------------------------------------------------------------------- writing


@dataclass
class _MicroBatchEmitter:
    network: BatchNetwork
    count: int
    builder: ProgramBuilder = field(init=False)
    whole: dict[relax.Var, relax.Expr] = field(init=False)
    tiles: dict[tuple[relax.Expr, int, int], relax.Expr] = field(default_factory=dict)
    """By variable, axis and number of the micro-batch."""
    levels: dict[relax.Var, int] = field(default_factory=dict)
    """How many sums, one after the other, a variable has to wait for."""
    values: dict[relax.Var, relax.Expr] = field(init=False)
    functions: dict[tuple[str, int], tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self.network.program
        self.builder = ProgramBuilder(program.inputs)
        self.whole = self.builder.take_parameters(program)
        self.values = {b.var: b.value for b in program.bindings}
        for var, value in self.values.items():
            read = variables(value)
            self.levels[var] = max(
                (self.levels.get(v, 0) + (self.network.labels.get(v) == SUM) for v in read), default=0
            )

    def emitted(self) -> Program:
        program = self.network.program
        for binding in program.bindings:
            if binding.var not in self.network.rules:
                self._whole(binding.var)
        outputs = [substitute(output, self._whole) for output in program.outputs]
        return self.builder.finish(outputs, {**program.functions, **dict(self.functions.values())})

    def span(self, extent: int, number: int) -> tuple[int, int]:
        """Which indices of an axis belong to a micro-batch, by its number."""
        return number * extent // self.count, (number + 1) * extent // self.count

    def function(
        self, found: BatchFunction, name: str, number: int
    ) -> tuple[tvm.ir.GlobalVar, tirx.PrimFunc]:
        begin, end = self.span(self.network.samples, number)
        if not found.counts:
            begin, end = 0, end - begin
        if (name, begin) not in self.functions:
            function = found.of_samples(begin, end)
            stem = unnumbered(name)
            variable = tvm.ir.GlobalVar(f"{stem}_{content_number(repr((name, begin, end)).encode())}")
            function = function.with_attr("global_symbol", variable.name_hint)
            relax.expr._update_type(variable, function.ty)
            self.functions[name, begin] = variable, function
        return self.functions[name, begin]

    def _origins(self, var: relax.Var) -> Sequence[str]:
        return self.network.program.origins[var.name]

    # --------------------------------------------------------------------------------- whole tensors

    def _whole(self, var: relax.Var) -> relax.Expr:
        """The whole tensor, concatenated if it is tiled."""
        if var in self.whole:
            return self.whole[var]
        label = self.network.labels.get(var)
        if label == SUM:
            self._add_up(self.levels[var])
            return self.whole[var]
        if var in self.network.rules:
            assert isinstance(label, int)
            for number in range(self.count):
                self._emit_tiles([var], number)
            tiles = [self.tiles[var, label, number] for number in range(self.count)]
            value: relax.Expr = relax.op.concat(tiles, axis=label)
        else:
            value = substitute(self.values[var], self._whole)
        self.whole[var] = self.builder.emit(value, self._origins(var), var.name)
        return self.whole[var]

    def _add_up(self, level: int) -> None:
        """Compute the sums that wait for at most `level` others, one micro-batch after the other."""
        sums = [
            var
            for var, rule in self.network.rules.items()
            if rule.label == SUM and var not in self.whole and self.levels[var] <= level
        ]
        totals: dict[relax.Var, relax.Expr] = {}
        for number in range(self.count):
            self._emit_tiles(sums, number, totals)
        self.whole.update(totals)

    # ----------------------------------------------------------------------------------------- tiles

    def _emit_tiles(
        self, wanted: Sequence[relax.Var], number: int, totals: dict[relax.Var, relax.Expr] | None = None
    ) -> None:
        """A tile of each, and before them those of all that they need, in the order of the program."""
        needed = self._needed(wanted, number)
        for var in self.values:
            if var in needed:
                self._emit_tile(var, number)
                if totals is not None and self.network.labels[var] == SUM:
                    new = self.tiles.pop((var, SUM, number))
                    if var in totals:
                        new = self.builder.emit(
                            relax.op.add(totals[var], new), self._origins(var), f"{var.name}.sum"
                        )
                    totals[var] = new

    def _needed(self, wanted: Sequence[relax.Var], number: int) -> set[relax.Var]:
        found: set[relax.Var] = set()
        queue = list(wanted)
        while queue:
            var = queue.pop()
            if var in found or (var, self._axis(var), number) in self.tiles:
                continue
            found.add(var)
            rule = self.network.rules[var]
            for operand, read in zip(rule.operands, rule.reads, strict=True):
                if read is not None and operand in self.network.rules:
                    queue.append(operand)
        return found

    def _axis(self, var: relax.Var) -> int:
        label = self.network.labels[var]
        return label if isinstance(label, int) else 0

    def _emit_tile(self, var: relax.Var, number: int) -> None:
        rule, origins = self.network.rules[var], self._origins(var)
        operands = [self._read(o, r, number, origins) for o, r in zip(rule.operands, rule.reads, strict=True)]

        def emit(expr: relax.Expr) -> relax.Expr:
            return self.builder.emit(expr, origins, f"{var.name}.band{number}")

        self.tiles[var, self._axis(var), number] = emit(rule.make(self, number, operands, emit))

    def _read(self, operand: relax.Expr, axis: Label, number: int, origins: Sequence[str]) -> relax.Expr:
        if not isinstance(operand, relax.Var | GenericConst):
            return operand
        if axis is None:
            return operand if isinstance(operand, GenericConst) else self._whole(operand)
        key = operand, axis, number
        if key not in self.tiles:
            self.tiles[key] = self._slice(operand, axis, number, origins)
        return self.tiles[key]

    def _slice(self, operand: relax.Expr, axis: int, number: int, origins: Sequence[str]) -> relax.Expr:
        """A slice of a tensor that is not tiled along this axis."""
        begin, end = self.span(tensor_shape(operand)[axis], number)
        if isinstance(operand, GenericConst) or operand.name in self.network.program.weights:
            if isinstance(operand, GenericConst):
                taken = weight_part(operand.value.numpy(), axis, begin, end).copy()
            else:
                taken = weight_part(self.network.program.weights[operand.name], axis, begin, end)
            return self.builder.weight(taken, part_name(operand, axis, begin, end))
        sliced = relax.op.strided_slice(self._whole(operand), [axis], [begin], [end])
        return self.builder.emit(sliced, origins, "rows")
