"""How large the tiles of a region are, and what memory its kernels then need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tvm import relax

from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import Program, is_op, tensor_shape, variables
from hybridc.passes.tiling.limits import MAX_TILES, UNREACHABLE_LIMIT_SLACK
from hybridc.passes.tiling.slice_rules import Operation, Slice, known_functions, operation_of, slice_of
from hybridc.passes.tiling.working_set import KernelGroup, size_bytes

Axes = Mapping[relax.Var, int]
"""The axis along which each tensor is tiled."""


@dataclass(frozen=True, slots=True)
class TiledTensor:
    """Tile i of a tensor holds the indices `cuts[i]` to `cuts[i + 1]` of its axis."""

    axis: int
    cuts: tuple[int, ...]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First index of each tile, and the one after its last."""
        return tuple(pairwise(self.cuts))


@dataclass
class TensorFacts:
    """Operations, extents and sizes of the tensors of a program, looked up once."""

    program: Program
    operations: dict[relax.Var, Operation | None] = field(init=False)
    _bytes: dict[relax.Expr, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        functions = known_functions(self.program.functions)
        self.operations = {b.var: operation_of(b.value, functions) for b in self.program.bindings}

    def extent(self, var: relax.Var, axis: int) -> int:
        """Of a tensor that an operation computes, along an axis."""
        operation = self.operations[var]
        assert operation is not None
        return operation.shape[axis]

    def size_bytes(self, var: relax.Expr) -> int:
        """Of a whole tensor."""
        if var not in self._bytes:
            self._bytes[var] = size_bytes(var)
        return self._bytes[var]


def choose_tile_sizes(
    facts: TensorFacts,
    kernels: Sequence[KernelGroup],
    region: Sequence[KernelGroup],
    axes: Axes,
    limit_bytes: int,
) -> dict[relax.Var, TiledTensor]:
    """The fewest tiles of a region, a power of two, with which no kernel exceeds `limit_bytes`.

    A kernel that exceeds it with the smallest tiles (its weights alone do) may need `UNREACHABLE_LIMIT_SLACK`
    times what it needs then. Empty if a tile cannot be computed at these sizes.
    """
    trials = list(try_tile_sizes(facts, kernels, region, axes))
    goals = [max(limit_bytes, int(UNREACHABLE_LIMIT_SLACK * (size or 0))) for size in trials[-1][1]]
    for tiled, needed in trials:
        if all(n is not None and n <= goal for n, goal in zip(needed, goals, strict=True)):
            return tiled if _can_be_computed(facts, tiled) else {}
    return {}


def try_tile_sizes(
    facts: TensorFacts, kernels: Sequence[KernelGroup], region: Sequence[KernelGroup], axes: Axes
) -> Iterator[tuple[dict[relax.Var, TiledTensor], list[int | None]]]:
    """The region with 2, 4, 8, ... tiles, and the working sets in bytes of `kernels` then."""
    members = [m.var for group in region for m in group.members if m.var in axes]
    extents = {var: facts.extent(var, axes[var]) for var in members}
    base = min(extents.values())
    most = min(base, MAX_TILES)
    for count in [*(2**i for i in range(1, most.bit_length()) if 2**i < most), most]:
        # in proportion to the smallest tensor, so that tiles of an image and of one half its size match
        even = [i * base // count for i in range(count + 1)]
        tiled = {v: TiledTensor(axes[v], tuple(c * e // base for c in even)) for v, e in extents.items()}
        yield tiled, [_working_set(facts, group, tiled) for group in kernels]


def _working_set(
    facts: TensorFacts, group: KernelGroup, tiled: Mapping[relax.Var, TiledTensor]
) -> int | None:
    """The most bytes that the first, the middle or the last tile needs; None if one cannot be computed."""
    own = tiled[group.result]
    count = len(own.cuts) - 1
    needed = [_tile_bytes(facts, group, tiled, number) for number in {0, count // 2, count - 1}]
    if group.is_view:
        return 0
    known = [n for n in needed if n is not None]
    return max(known) if len(known) == len(needed) else None


def _tile_bytes(
    facts: TensorFacts, group: KernelGroup, tiled: Mapping[relax.Var, TiledTensor], number: int
) -> int | None:
    members = [m for m in group.members if m.var in tiled]
    own = {member.var for member in members}
    read: dict[tuple[relax.Expr, Slice | None], int] = {}
    largest_halo = 0
    for member in members:
        operation, (begin, end) = facts.operations[member.var], tiled[member.var].spans[number]
        rule = slice_of(operation, tiled[member.var].axis, begin, end)
        if rule is None or operation is None:
            return None
        for operand, shape, sliced in zip(operation.operands, operation.shapes, rule.slices, strict=True):
            if shape is not None and operand not in own:
                whole = facts.size_bytes(operand)
                size = whole if sliced is None else whole // shape[sliced.axis] * (sliced.end - sliced.begin)
                read[operand, sliced] = size
                if _is_halo(tiled.get(operand), sliced) and not has_fact(member.value, Fact.CONVOLUTION):
                    largest_halo = max(largest_halo, 2 * size)  # a kernel of its own puts it together
    result, (begin, end) = group.result, tiled[group.result].spans[number]
    extent = facts.extent(result, tiled[result].axis)
    return max(sum(read.values()) + facts.size_bytes(result) // extent * (end - begin), largest_halo)


def _is_halo(own: TiledTensor | None, sliced: Slice | None) -> bool:
    return own is not None and sliced is not None and (sliced.begin, sliced.end) not in own.spans


def _can_be_computed(facts: TensorFacts, tiled: Mapping[relax.Var, TiledTensor]) -> bool:
    return all(
        slice_of(facts.operations[var], own.axis, *span) is not None
        for var, own in tiled.items()
        for span in own.spans
    )


def concats_in_readers(program: Program, axes: Axes) -> set[relax.Var]:
    """Concatenations that need no kernel: only convolutions with a halo read them, tiled along the same axis,
    and these read the tiles of the operands themselves."""
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
    """Whether a convolution of `var` reads a halo along an axis."""
    if not has_fact(value, Fact.CONVOLUTION) or not var.same_as(value.args[0]):
        return False
    return axis >= 2 and tensor_shape(value.args[1])[axis] > 1
