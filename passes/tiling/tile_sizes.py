"""Bands: into how many pieces the tensors of a region are cut, and what a kernel then needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tvm import relax

from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import Program, is_op, tensor_shape, variables
from hybridc.passes.tiling.slice_rules import Operation, Part, operation_of, share_of
from hybridc.passes.tiling.working_set import KernelGroup, size_bytes

MAX_BANDS = 32
"""Of one tensor. More would gain little memory and cost a launch each; weights are what is left by then."""
HOPELESS = 1.2
"""A kernel that stays above the limit with the most bands is content with this much more than it has then."""

Axes = Mapping[relax.Var, int]
"""The axis along which each tensor is in bands."""


@dataclass(frozen=True, slots=True)
class Bands:
    """Band i of a tensor holds the indices `cuts[i]` to `cuts[i + 1]` of its axis."""

    axis: int
    cuts: tuple[int, ...]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return tuple(pairwise(self.cuts))


@dataclass
class Facts:
    """What is asked about a program again and again."""

    program: Program
    operations: dict[relax.Var, Operation | None] = field(init=False)
    _bytes: dict[relax.Expr, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.operations = {b.var: operation_of(b.value) for b in self.program.bindings}

    def extent(self, var: relax.Var, axis: int) -> int:
        operation = self.operations[var]
        assert operation is not None
        return operation.shape[axis]

    def size_bytes(self, var: relax.Expr) -> int:
        if var not in self._bytes:
            self._bytes[var] = size_bytes(var)
        return self._bytes[var]


def choose_cuts(
    facts: Facts, kernels: Sequence[KernelGroup], region: Sequence[KernelGroup], axes: Axes, limit_bytes: int
) -> dict[relax.Var, Bands]:
    """The fewest bands of a region, a power of two, with which none of the kernels exceeds the limit.

    A kernel that exceeds it however small its bands are (its weights alone do) is content with little more
    than it needs at least. Nothing if a share cannot be computed at these cuts.
    """
    trials = list(try_cuts(facts, kernels, region, axes))
    goals = [max(limit_bytes, int(HOPELESS * (size or 0))) for size in trials[-1][1]]
    for bands, needed in trials:
        if all(n is not None and n <= goal for n, goal in zip(needed, goals, strict=True)):
            return bands if _can_be_computed(facts, bands) else {}
    return {}


def try_cuts(
    facts: Facts, kernels: Sequence[KernelGroup], region: Sequence[KernelGroup], axes: Axes
) -> Iterator[tuple[dict[relax.Var, Bands], list[int | None]]]:
    """Bands, twice as many each time, and the working sets of the kernels then."""
    members = [m.var for group in region for m in group.members if m.var in axes]
    extents = {var: facts.extent(var, axes[var]) for var in members}
    base = min(extents.values())
    most = min(base, MAX_BANDS)
    for count in [*(2**i for i in range(1, most.bit_length()) if 2**i < most), most]:
        # in proportion to the smallest tensor: what halves or doubles an image meets its bands
        even = [i * base // count for i in range(count + 1)]
        bands = {v: Bands(axes[v], tuple(c * e // base for c in even)) for v, e in extents.items()}
        yield bands, [_working_set(facts, group, bands) for group in kernels]


def _working_set(facts: Facts, group: KernelGroup, bands: Mapping[relax.Var, Bands]) -> int | None:
    """The most bytes that the first, the middle or the last band needs; None if one cannot be computed."""
    own = bands[group.result]
    count = len(own.cuts) - 1
    needed = [_band_bytes(facts, group, bands, band) for band in {0, count // 2, count - 1}]
    if group.is_view:
        return 0
    known = [n for n in needed if n is not None]
    return max(known) if len(known) == len(needed) else None


def _band_bytes(facts: Facts, group: KernelGroup, bands: Mapping[relax.Var, Bands], band: int) -> int | None:
    members = [m for m in group.members if m.var in bands]
    own = {member.var for member in members}
    read: dict[tuple[relax.Expr, Part | None], int] = {}
    largest_halo = 0
    for member in members:
        operation, (begin, end) = facts.operations[member.var], bands[member.var].spans[band]
        share = share_of(operation, bands[member.var].axis, begin, end)
        if share is None or operation is None:
            return None
        for operand, shape, part in zip(operation.operands, operation.shapes, share.parts, strict=True):
            if shape is not None and operand not in own:
                whole = facts.size_bytes(operand)
                size = whole if part is None else whole // shape[part.axis] * (part.end - part.begin)
                read[operand, part] = size
                if _is_halo(bands.get(operand), part) and not has_fact(member.value, Fact.CONVOLUTION):
                    largest_halo = max(largest_halo, 2 * size)  # a kernel of its own puts it together
    result, (begin, end) = group.result, bands[group.result].spans[band]
    extent = facts.extent(result, bands[result].axis)
    return max(sum(read.values()) + facts.size_bytes(result) // extent * (end - begin), largest_halo)


def _is_halo(own: Bands | None, part: Part | None) -> bool:
    return own is not None and part is not None and (part.begin, part.end) not in own.spans


def _can_be_computed(facts: Facts, bands: Mapping[relax.Var, Bands]) -> bool:
    return all(
        share_of(facts.operations[var], own.axis, *span) is not None
        for var, own in bands.items()
        for span in own.spans
    )


def concats_in_readers(program: Program, axes: Axes) -> set[relax.Var]:
    """Concatenations that need no kernel: only convolutions with border rows read them, in bands along the
    same axis, and these put bands of their operands together as they read."""
    read_by: dict[relax.Var, list[bool]] = {}
    for binding in program.bindings:
        for var in variables(binding.value):
            reads = binding.var in axes and axes[binding.var] == axes.get(var)
            read_by.setdefault(var, []).append(reads and _has_border(binding.value, var, axes[var]))
    for output in program.outputs:
        for var in variables(output):
            read_by.setdefault(var, []).append(False)
    return {
        binding.var
        for binding in program.bindings
        if binding.var in axes and is_op(binding.value, "concat") and all(read_by.get(binding.var, [False]))
    }


def _has_border(value: relax.Expr, var: relax.Var, axis: int) -> bool:
    """Whether a convolution of `var` reads rows beside its own."""
    if not has_fact(value, Fact.CONVOLUTION) or not var.same_as(value.args[0]):
        return False
    return axis >= 2 and tensor_shape(value.args[1])[axis] > 1
