"""A training step whose kernels are too large goes through its batch in parts.

Every tensor that has the samples of the batch along an axis becomes some tensors of its own, its *bands*, and
every operator that treats samples one by one becomes calls on bands. What sums over the batch, a gradient of
a parameter or the statistics of BatchNorm, becomes parts that are added up; who reads the sum waits for them.

All that can be done with one part of the batch is done before the next one begins, so that little of each
band is live at a time: without BatchNorm forward and backward pass of a part, as in gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax, tirx
from tvm.ir.expr import GenericConst

from hybridc.passes.batch_blocks import statistics_apart
from hybridc.passes.batch_functions import SUM, BatchFunction, Label, unnumbered
from hybridc.passes.batch_network import Network, samples_of
from hybridc.passes.program import (
    Program,
    ProgramBuilder,
    content_number,
    part_name,
    substitute,
    tensor_shape,
    variables,
    weight_part,
)
from hybridc.passes.working_set import KernelGroup, kernel_groups, size_bytes

MAX_PARTS = 32
"""Of a batch. More would gain little memory and cost a launch each; weights are what is left by then."""
MAX_CALLS = 4000
"""Of operators on bands: with more, launches would cost more than a slower device."""
HOPELESS = 1.2
"""A kernel that stays above the limit with the most parts is content with this much more than it has then."""


def split_batch(program: Program, limit_bytes: int) -> Program:
    """Go through the batch in the fewest parts with which the working sets of kernels are within the limit.

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
    network = Network(statistics_apart(program, samples), samples)
    if not any(split.label == SUM for split in network.splits.values()):
        return program
    parts = _fewest_parts(network, kernel_groups(network.program), limit_bytes)
    return program if parts == 1 else _Writer(network, parts).written()


# ------------------------------------------------------------------------------------ how many parts


def _fewest_parts(network: Network, groups: Sequence[KernelGroup], limit_bytes: int) -> int:
    """The fewest equal parts with which no kernel that depends on the batch exceeds the limit.

    Nor need they be smaller than what does not depend on it: a parameter's update is as large as it must be.
    """
    others = max((g.size_bytes for g in groups if g.result not in network.splits), default=0)
    limit_bytes = max(limit_bytes, others)
    large = [g for g in groups if g.size_bytes > limit_bytes and g.result in network.splits]
    most = min(MAX_PARTS, MAX_CALLS // max(len(network.splits), 1))
    counts = [n for n in range(2, min(most, network.samples) + 1) if network.samples % n == 0]
    if not large or not counts:
        return 1

    def needed(group: KernelGroup, parts: int) -> int:
        return sum(
            size_bytes(v)
            // (parts if network.axis(v) is not None or isinstance(network.labels.get(v), tuple) else 1)
            for v in (*group.inputs, group.result)
        )

    goals = [max(limit_bytes, int(HOPELESS * needed(group, counts[-1]))) for group in large]
    fits = (n for n in counts if all(needed(g, n) <= goal for g, goal in zip(large, goals, strict=True)))
    return next(fits)


# ------------------------------------------------------------------------------------------- writing


@dataclass
class _Writer:
    network: Network
    parts: int
    builder: ProgramBuilder = field(init=False)
    whole: dict[relax.Var, relax.Expr] = field(init=False)
    bands: dict[tuple[relax.Expr, int, int], relax.Expr] = field(default_factory=dict)
    """By variable, axis and number of the part."""
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

    def written(self) -> Program:
        program = self.network.program
        for binding in program.bindings:
            if binding.var not in self.network.splits:
                self._whole(binding.var)
        outputs = [substitute(output, self._whole) for output in program.outputs]
        return self.builder.finish(outputs, {**program.functions, **dict(self.functions.values())})

    def span(self, extent: int, part: int) -> tuple[int, int]:
        """Which indices of an axis belong to a part of the batch."""
        return part * extent // self.parts, (part + 1) * extent // self.parts

    def function(self, found: BatchFunction, name: str, part: int) -> tuple[tvm.ir.GlobalVar, tirx.PrimFunc]:
        begin, end = self.span(self.network.samples, part)
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
        """All of a tensor: from its bands, if it is in bands."""
        if var in self.whole:
            return self.whole[var]
        label = self.network.labels.get(var)
        if label == SUM:
            self._add_up(self.levels[var])
            return self.whole[var]
        if var in self.network.splits:
            assert isinstance(label, int)
            for part in range(self.parts):
                self._write_bands([var], part)
            bands = [self.bands[var, label, part] for part in range(self.parts)]
            value: relax.Expr = relax.op.concat(bands, axis=label)
        else:
            value = substitute(self.values[var], self._whole)
        self.whole[var] = self.builder.emit(value, self._origins(var), var.name)
        return self.whole[var]

    def _add_up(self, level: int) -> None:
        """Compute the sums that need not wait for more than this, one part of the batch after the other."""
        sums = [
            var
            for var, split in self.network.splits.items()
            if split.label == SUM and var not in self.whole and self.levels[var] <= level
        ]
        totals: dict[relax.Var, relax.Expr] = {}
        for part in range(self.parts):
            self._write_bands(sums, part, totals)
        self.whole.update(totals)

    # ----------------------------------------------------------------------------------------- bands

    def _write_bands(
        self, wanted: Sequence[relax.Var], part: int, totals: dict[relax.Var, relax.Expr] | None = None
    ) -> None:
        """One band of each, and before them of all that they need, in the order of the program."""
        needed = self._needed(wanted, part)
        for var in self.values:
            if var in needed:
                self._write_band(var, part)
                if totals is not None and self.network.labels[var] == SUM:
                    new = self.bands.pop((var, SUM, part))
                    if var in totals:
                        new = self.builder.emit(
                            relax.op.add(totals[var], new), self._origins(var), f"{var.name}.sum"
                        )
                    totals[var] = new

    def _needed(self, wanted: Sequence[relax.Var], part: int) -> set[relax.Var]:
        found: set[relax.Var] = set()
        queue = list(wanted)
        while queue:
            var = queue.pop()
            if var in found or (var, self._axis(var), part) in self.bands:
                continue
            found.add(var)
            split = self.network.splits[var]
            for operand, read in zip(split.operands, split.reads, strict=True):
                if read is not None and operand in self.network.splits:
                    queue.append(operand)
        return found

    def _axis(self, var: relax.Var) -> int:
        label = self.network.labels[var]
        return label if isinstance(label, int) else 0

    def _write_band(self, var: relax.Var, part: int) -> None:
        split, origins = self.network.splits[var], self._origins(var)
        operands = [self._read(o, r, part, origins) for o, r in zip(split.operands, split.reads, strict=True)]

        def emit(expr: relax.Expr) -> relax.Expr:
            return self.builder.emit(expr, origins, f"{var.name}.band{part}")

        self.bands[var, self._axis(var), part] = emit(split.make(self, part, operands, emit))

    def _read(self, operand: relax.Expr, axis: Label, part: int, origins: Sequence[str]) -> relax.Expr:
        if not isinstance(operand, relax.Var | GenericConst):
            return operand
        if axis is None:
            return operand if isinstance(operand, GenericConst) else self._whole(operand)
        key = operand, axis, part
        if key not in self.bands:
            self.bands[key] = self._cut(operand, axis, part, origins)
        return self.bands[key]

    def _cut(self, operand: relax.Expr, axis: int, part: int, origins: Sequence[str]) -> relax.Expr:
        """A part of a tensor that is not in bands along this axis."""
        begin, end = self.span(tensor_shape(operand)[axis], part)
        if isinstance(operand, GenericConst) or operand.name in self.network.program.weights:
            if isinstance(operand, GenericConst):
                taken = weight_part(operand.value.numpy(), axis, begin, end).copy()
            else:
                taken = weight_part(self.network.program.weights[operand.name], axis, begin, end)
            return self.builder.weight(taken, part_name(operand, axis, begin, end))
        sliced = relax.op.strided_slice(self._whole(operand), [axis], [begin], [end])
        return self.builder.emit(sliced, origins, "rows")
