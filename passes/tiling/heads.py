"""Attention cut by heads, so that each device has the caches of its own heads and computes these alone.

From the rows that take their places in caches the cut goes on to all that has an axis of heads: forward to
what attention writes, and backward to queries and new rows, up to the products that these come from where
their columns can be cut like the heads. (Megatron-LM cuts attention so: Shoeybi et al., 2019.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import relax

from hybridc.passes.program.program import Program, variables
from hybridc.passes.tiling.head_functions import HEADS, HeadFunction
from hybridc.passes.tiling.slice_rules import Operation, Slice, slice_of
from hybridc.passes.tiling.tile_sizes import TensorFacts, TiledTensor

TiledTensors = Mapping[relax.Var, TiledTensor]


@dataclass(frozen=True, slots=True)
class Cache:
    """An input, and the output in which new rows have taken their places."""

    past: relax.Var
    present: relax.Var
    heads: int


def caches_of_heads(program: Program, facts: TensorFacts) -> list[Cache]:
    """Caches that nothing reads but what lets rows take their places in them."""
    readers: dict[relax.Var, int] = {}
    for binding in program.bindings:
        for var in set(variables(binding.value)):
            readers[var] = readers.get(var, 0) + 1
    inputs, outputs = set(program.inputs), list(program.outputs)
    found = []
    for var, operation in facts.operations.items():
        called = None if operation is None else operation.function
        if operation is None or not isinstance(called, HeadFunction) or not called.appends:
            continue
        past, heads = operation.operands[1], operation.shape[HEADS]
        if heads > 1 and past in inputs and readers[past] == 1 and outputs.count(var) == 1:
            found.append(Cache(past, var, heads))
    return found


def cut_by_heads(program: Program, facts: TensorFacts, caches: Sequence[Cache], share: float) -> TiledTensors:
    """Caches, and what is computed with them, in two parts, the second one with about this share of the
    heads.

    Empty if a part would have none, or if anything reads all heads of a cache.
    """
    cuts = {each: each.heads - round(share * each.heads) for each in caches}
    if not cuts or not all(0 < cut < each.heads for each, cut in cuts.items()):
        return {}
    found: dict[relax.Var, TiledTensor] = {}
    for each, cut in cuts.items():
        found[each.past] = found[each.present] = TiledTensor(HEADS, (0, cut, each.heads))
    _follow(facts, found)
    _follow_back(facts, found)
    return found if all(_is_read_by_heads(program, facts, each, found) for each in caches) else {}


def cut_alike(operation: Operation | None, tile: TiledTensor, found: TiledTensors) -> bool:
    """Whether an operation can be cut so, and reads parts of others that are cut alike."""
    if operation is None or len(operation.shape) <= tile.axis or operation.shape[tile.axis] != tile.cuts[-1]:
        return False
    for span in tile.spans:
        rule = slice_of(operation, tile.axis, *span)
        if rule is None:
            return False
        for operand, sliced in zip(operation.operands, rule.slices, strict=True):
            other = found.get(operand)
            if other is None or sliced is None:
                continue
            if other.axis != sliced.axis or (sliced.begin, sliced.end) not in other.spans:
                return False
    return True


def _follow(facts: TensorFacts, found: dict[relax.Var, TiledTensor]) -> None:
    """Add what reads parts and can be cut like them, in the order of the program."""
    for var, operation in facts.operations.items():
        if operation is None or var in found:
            continue
        read = next((operand for operand in operation.operands if operand in found), None)
        if read is not None and (tile := _result_tile(operation, read, found)) is not None:
            found[var] = tile


def _result_tile(operation: Operation, read: relax.Var, found: TiledTensors) -> TiledTensor | None:
    """How the result is cut of whose operand only one part each is read then."""
    own, place = found[read], operation.operands.index(read)
    of = operation.source(place)[own.axis]
    for axis, extent in enumerate(operation.shape):
        if any(cut * extent % of for cut in own.cuts):
            continue
        tile = TiledTensor(axis, tuple(cut * extent // of for cut in own.cuts))
        rules = [slice_of(operation, axis, *span) for span in tile.spans]
        wanted = [Slice(own.axis, *span) for span in own.spans]
        if [None if rule is None else rule.slices[place] for rule in rules] == wanted:
            return tile if cut_alike(operation, tile, found) else None
    return None


def _follow_back(facts: TensorFacts, found: dict[relax.Var, TiledTensor]) -> None:
    """Add what parts are computed of, where it can be cut like them."""
    for var in reversed(facts.operations):
        operation, tile = facts.operations[var], found.get(var)
        if operation is None or tile is None:
            continue
        rules = [slice_of(operation, tile.axis, *span) for span in tile.spans]
        for place, operand in enumerate(operation.operands):
            slices = [None if rule is None else rule.slices[place] for rule in rules]
            like = _tile_of_slices(slices, operation.shapes[place])
            if (
                operand not in found
                and like is not None
                and cut_alike(facts.operations.get(operand), like, {})
            ):
                found[operand] = like


def _tile_of_slices(slices: Sequence[Slice | None], shape: tuple[int, ...] | None) -> TiledTensor | None:
    """The tensor in parts that are these slices, if they follow one another and are all of it."""
    if shape is None or any(each is None for each in slices):
        return None
    known = [each for each in slices if each is not None]
    cuts = (0, *(each.end for each in known))
    is_all = [(each.begin, each.axis) for each in known] == [(cut, known[0].axis) for cut in cuts[:-1]]
    return TiledTensor(known[0].axis, cuts) if is_all and cuts[-1] == shape[known[0].axis] else None


def _is_read_by_heads(program: Program, facts: TensorFacts, cache: Cache, found: TiledTensors) -> bool:
    """Whether all that reads a cache, or what it becomes, reads heads of one part."""
    for binding in program.bindings:
        read = {cache.past, cache.present}.intersection(variables(binding.value))
        if not read:
            continue
        operation, tile = facts.operations[binding.var], found.get(binding.var)
        if tile is None or not cut_alike(operation, tile, {var: found[var] for var in read}):
            return False
    return not any(cache.past in variables(output) for output in program.outputs)
