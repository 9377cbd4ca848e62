"""Scaled dot-product attention, as `passes/fuse/attention.py` writes it and both devices read it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cpu.core.nest import Nest, NestBlock, loads, read_nest, replace_loads, substitute

HIDES = -(2.0**127)
"""A mask that adds this or less hides a key: no score makes up for it, and the exponential is zero. Exporters
write -inf, or the least float32, which is twice as much."""
WORTH_KEYS = 64
"""Of fewer keys it takes longer to look which are hidden than to compute."""
BLOCKS = ("scores", "logits", "peak", "weights", "total", "context", "result")


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """A function of them by name; `scores` has iterators batch..., row, column and `depth`."""

    nest: Nest
    blocks: Mapping[str, NestBlock]

    @property
    def operands(self) -> tuple[int, int, int]:
        """Positions of queries, keys and values among the parameters."""
        scores, context = (self.blocks[name].value.b for name in ("scores", "context"))
        sources = scores.a.source, scores.b.source, context.b.source
        query, key, value = (self.nest.parameter(source) for source in sources)
        assert query is not None and key is not None and value is not None
        return query, key, value

    @property
    def masks(self) -> frozenset[int]:
        """Positions of what scores are combined with."""
        inputs = range(len(self.nest.function.params) - 1)
        return frozenset(inputs) - frozenset(self.operands)

    def extent(self, block: str, axis: int) -> int:
        return self.blocks[block].extents[self.blocks[block].spatial[axis]]

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.extent("scores", a) for a in range(len(self.blocks["scores"].spatial) - 2))

    @property
    def rows(self) -> int:
        return self.extent("scores", -2)

    @property
    def columns(self) -> int:
        return self.extent("scores", -1)

    @property
    def depth(self) -> int:
        block = self.blocks["scores"]
        return block.extents[block.reduce[0]]

    @property
    def width(self) -> int:
        return self.extent("context", -1)

    def batch_at(self, flat: ir.Expr) -> list[ir.Expr]:
        point: list[ir.Expr] = []
        for extent in reversed(self.batch):
            point.insert(0, tirx.floormod(flat, integer(extent)) if extent > 1 else integer(0))
            flat = tirx.floordiv(flat, integer(extent))
        return point

    def factor(self, block: str, side: int, spatial: Sequence[ir.Expr], reduce: ir.Expr) -> ir.Expr:
        """The left (0) or right (1) factor of a product at a point."""
        product = self.blocks[block]
        points = dict(zip((*product.spatial, *product.reduce), (*spatial, reduce), strict=True))
        load = (product.value.b.a, product.value.b.b)[side]
        return tirx.BufferLoad(load.source, [substitute(index, points) for index in load.indices])

    def logit(self, at: Sequence[ir.Expr], score: ir.Expr) -> ir.Expr:
        """What the softmax sees of a score."""
        scores = self.blocks["scores"].buffer
        value = self.blocks["logits"].value_at(at)
        return replace_loads(value, lambda buffer, _: score if buffer.same_as(scores) else None)

    @property
    def factor_of_scores(self) -> float | None:
        """The number by which scores are multiplied in front of the softmax, if that is all."""
        score = tirx.Var("score", "float32")
        value = self.logit([integer(0)] * (len(self.batch) + 2), score)
        if value.same_as(score):
            return 1.0
        if isinstance(value, tirx.Mul | tirx.Div):
            is_left, is_product = value.a.same_as(score), isinstance(value, tirx.Mul)
            number, other = (value.b, value.a) if is_left else (value.a, value.b)
            if other.same_as(score) and isinstance(number, tirx.FloatImm) and (is_product or is_left):
                return float(number.value) if is_product else 1.0 / float(number.value)
        return None

    @property
    def hiding_mask(self) -> ir.TensorLoad | None:
        """What is added to a score and may hide its key, or chooses a number that does, at the iterators of
        the block `logits`: the smallest tensor that distinguishes keys, as a mask of positions is the same
        for all heads. None if there is none, or there are few keys."""
        columns = self.blocks["logits"].spatial[-1]
        masks = [mask for mask, _ in self._masks() if mask.indices[-1].same_as(columns)]
        if self.columns < WORTH_KEYS:
            return None
        return min(masks, key=lambda mask: math.prod(self.lines(mask)), default=None)

    def _masks(self) -> list[tuple[ir.TensorLoad, bool]]:
        """Parameters that are added to scores or choose between them and a number, which are the latter."""
        value, found = self.blocks["logits"].value, list[tuple[ir.TensorLoad, bool]]()
        while True:
            chosen = self._chooses(value)
            if chosen is not None:
                found.append((chosen, True))
                value = value.true_value
                continue
            if not isinstance(value, tirx.Add):
                return found
            sides = (value.a, value.b), (value.b, value.a)
            is_mask = [
                isinstance(a, ir.TensorLoad) and self.nest.parameter(a.source) is not None for a, _ in sides
            ]
            if not any(is_mask):
                return found
            mask, value = sides[is_mask.index(True)]
            found.append((mask, False))

    def _chooses(self, value: ir.Expr) -> ir.TensorLoad | None:
        """The parameter that is zero where a number that hides a key is taken; None for another value."""
        if not isinstance(value, tirx.Select) or not isinstance(value.condition, tirx.NE):
            return None
        mask, zero, other = value.condition.a, value.condition.b, value.false_value
        is_number = all(isinstance(each, tirx.FloatImm) for each in (zero, other))
        if not is_number or float(zero.value) != 0.0 or not float(other.value) <= HIDES:
            return None
        is_mask = isinstance(mask, ir.TensorLoad) and self.nest.parameter(mask.source) is not None
        return mask if is_mask else None

    def lines(self, mask: ir.TensorLoad) -> tuple[int, ...]:
        """Batches and rows that a mask distinguishes; one along an axis that it does not depend on."""
        logits = self.blocks["logits"]
        return tuple(
            logits.extents[axis] if any(_depends(index, axis) for index in mask.indices) else 1
            for axis in logits.spatial[:-1]
        )

    def hides(self, mask: ir.TensorLoad, at: Sequence[ir.Expr]) -> ir.Expr:
        """Whether a mask hides a key from a row, `at` being batch, row and key; what is not a number hides
        nothing."""
        places = dict(zip(self.blocks["logits"].spatial, at, strict=True))
        value = tirx.BufferLoad(mask.source, [substitute(index, places) for index in mask.indices])
        if any(chooses and each.source.same_as(mask.source) for each, chooses in self._masks()):
            return tirx.EQ(value, tirx.FloatImm("float32", 0.0))
        return value <= tirx.FloatImm("float32", HIDES)

    def quotient(self, value: ir.Expr, total: ir.Expr) -> ir.Expr:
        """A sum of weighted values divided by the total of the weights; zero where nothing has a weight, if
        the function says so."""
        if not isinstance(self.blocks["result"].value, tirx.Select):
            return value / total
        zero = tirx.FloatImm("float32", 0.0)
        return tirx.Select(total > zero, value / total, zero)

    def store(self, at: Sequence[ir.Expr], value: ir.Expr) -> tirx.BufferStore:
        """Write the element of the result that is the context's at a point."""
        result, context = self.blocks["result"], self.blocks["context"].buffer
        (load,) = (load for load in loads(result.value) if load.source.same_as(context))
        places = {axis: at[i] for i, axis in enumerate(load.indices) if isinstance(axis, ir.Var)}
        return tirx.BufferStore(result.buffer, value, [places.get(v, integer(0)) for v in result.spatial])


def _depends(index: ir.Expr, axis: ir.Var) -> bool:
    """Whether an index changes along an axis: with each position, or as rows that come again."""
    found: list[ir.Var] = []
    tvm_ffi.structural_walk(index, (ir.Var, found.append))
    return any(each.same_as(axis) for each in found)


def read_attention(function: tirx.PrimFunc) -> AttentionBlocks | None:
    """The blocks of an attention in float32; None of any other function."""
    nest = read_nest(function)
    names = {block.name for block in nest.blocks} if nest else set()
    if nest is None or names != set(BLOCKS) or len(nest.blocks) != len(BLOCKS):
        return None
    if any(str(p.dtype) != "float32" for p in function.params):
        return None
    return AttentionBlocks(nest, {block.name: block for block in nest.blocks})
