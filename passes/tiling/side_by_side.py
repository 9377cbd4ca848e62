"""Products cut by columns, so that both devices compute a part of each side by side.

Where reading weights is what takes the time, as in a decoder's steps, a device is idle while the other one
has its layers. Cut by columns each large product is two, of which the second is meant for the CPU: it reads
the same rows and some columns of the weight, which never cross the link. Element-wise operators behind a
product are cut like it, so that they can be its epilogue. What reads all columns reads the parts
concatenated. Where that is a normalisation, or other cheap arithmetic between two products, it is there
twice, once for each device: what crosses the link are the parts, in both directions at once. (Column-parallel
linear layers: Shoeybi et al., "Megatron-LM", 2019, there between equal devices.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tvm import relax

from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    is_op,
    operator_name,
    substitute,
    variables,
)
from hybridc.passes.tiling.heads import TiledTensors, caches_of_heads, cut_alike, cut_by_heads
from hybridc.passes.tiling.slice_rules import Operation
from hybridc.passes.tiling.split_products import split_products
from hybridc.passes.tiling.tile import emit_tiles, tile_name
from hybridc.passes.tiling.tile_sizes import TensorFacts, TiledTensor
from hybridc.passes.tiling.working_set import size_bytes

_STEP = 64
"""Columns that a GPU's kernels compute together: parts are multiples of it, and of the weight's panels."""
_MOST_SIZES = 8
"""Of products, up to which all ways to round their second parts up or down are looked at."""
# A link's latency is some microseconds, in which a GPU reads a megabyte.
_LEAST_BYTES = 1 << 20
"""Of the weights of a product that is cut."""
_CHEAP = ("root_mean_square", "layer_norm", "rms_norm", "split", "strided_slice")
"""Beside element-wise operators and views."""


@dataclass(frozen=True, slots=True)
class LargeProduct:
    """A product, or a convolution, with a large constant weight."""

    result: relax.Var
    axis: int
    """Of the columns, or channels, of its result."""
    columns: int
    panel: int
    """Columns of the weight that lie together."""
    weight: str
    """Its name, or that of its largest part."""
    weight_bytes: int

    @property
    def step(self) -> int:
        """Columns of which a second part has a multiple."""
        step = math.lcm(self.panel, _STEP)
        return step if self.columns >= 8 * step else self.panel

    def second_bytes(self, begin: int) -> float:
        """Of the weights of a second part that begins with this column."""
        return self.weight_bytes * (1 - begin / self.columns)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A program with products in two parts, and perhaps with caches."""

    program: Program
    second_weights: frozenset[str]
    """Of the second parts."""
    inputs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Of caches in two parts, by the name of the input that they were, those of the inputs that they are."""
    outputs: Mapping[int, int] = field(default_factory=dict)
    """Of outputs in two parts, the positions of the first ones, and of the second ones."""


def large_products(program: Program) -> list[LargeProduct]:
    """Those with large weights, in the order of the program."""
    return [
        product
        for var, operation in TensorFacts(program).operations.items()
        if operation is not None and (product := _product(program, var, operation)) is not None
        if product.weight_bytes >= _LEAST_BYTES
    ]


def _product(program: Program, var: relax.Var, operation: Operation) -> LargeProduct | None:
    rank = len(operation.shape)
    if operation.packed is not None:
        weights, axis, panel = operation.operands[2:], rank - 1, operation.source(2)[2]
    elif is_op(operation.call, "matmul") and len(operation.shapes[1] or ()) == 2:
        weights, axis, panel = operation.operands[1:2], rank - 1, 1
    elif has_fact(operation.call, Fact.CONVOLUTION) and int(operation.call.attrs.groups) == 1:
        weights, axis, panel = operation.operands[1:2], 1, 1
    else:
        return None
    if not all(isinstance(w, relax.Var) and w.name in program.weights for w in weights):
        return None
    name = max(weights, key=size_bytes).name
    return LargeProduct(var, axis, operation.shape[axis], panel, name, sum(map(size_bytes, weights)))


def side_by_side(
    program: Program, products: Sequence[LargeProduct], share: float, heads: float = 0.0
) -> SideBySide | None:
    """With these products in two parts, the second ones with this share of the weights or little more.

    `heads` is the share of the heads of caches, where these are cut, too. Requires: `program` canonical,
    nothing of it tiled. Ensures: the same results up to rounding, inputs and outputs as they were, but for
    those that are in parts, whose second parts stand behind all others. None if no product can be cut so.
    """
    if heads:
        weights = {product.weight for product in products}
        program, parts = split_products(program, {product.result for product in products})
        products = [each for each in large_products(program) if each.weight in weights | parts]
    facts = TensorFacts(program)
    caches = caches_of_heads(program, facts)
    tiled = dict(cut_by_heads(program, facts, caches, heads))
    apart = [(each.past, each.present) for each in caches if each.past in tiled]
    tiled = _tiled(facts, products, share, tiled)
    if not tiled.keys() - {var for pair in apart for var in pair}:
        return None
    cut = emit_tiles(program, tiled, frozenset(var for pair in apart for var in pair))
    made = _with_own_operands(cut, {tile_name(var, 1) for var in tiled})
    firsts = [i for i, output in enumerate(program.outputs) if any(output.same_as(new) for _, new in apart)]
    return replace(
        made,
        inputs={past.name: (tile_name(past, 0), tile_name(past, 1)) for past, _ in apart},
        outputs={position: len(program.outputs) + number for number, position in enumerate(firsts)},
    )


def _tiled(
    facts: TensorFacts, products: Sequence[LargeProduct], share: float, heads: TiledTensors
) -> dict[relax.Var, TiledTensor]:
    """What is cut by heads, the other products, and the element-wise operators behind them that can be cut
    like them."""
    wanted = _cuts(products, share, heads)
    found = dict(heads)
    for var, operation in facts.operations.items():
        if var in heads:
            continue
        if var in wanted:
            tile = wanted[var]
        elif operation is not None and has_fact(operation.call, Fact.ELEMENTWISE):
            like = [found[operand] for operand in operation.operands if operand in found]
            if not like:
                continue
            tile = like[0]
        else:
            continue
        if 0 < tile.cuts[1] < tile.cuts[2] and cut_alike(operation, tile, found):
            found[var] = tile
    return found


def _cuts(products: Sequence[LargeProduct], share: float, heads: TiledTensors) -> TiledTensors:
    """Where products begin their second parts: alike where they are of one size, so that they have one
    function, and together with those that are cut by heads with so much of the weights or little more."""
    wanted_bytes, sizes = 0.0, dict[tuple[int, int, int], list[LargeProduct]]()
    for product in products:
        wanted_bytes += share * product.weight_bytes
        if product.result in heads:
            wanted_bytes -= product.second_bytes(heads[product.result].cuts[1])
        else:
            sizes.setdefault((product.columns, product.step, product.weight_bytes), []).append(product)
    left_bytes = sum(each.weight_bytes for alike in sizes.values() for each in alike)
    of_each = min(max(wanted_bytes / left_bytes, 0.0), 1.0) if left_bytes else 0.0
    ways: list[Sequence[int]] = []
    for columns, step, _ in sizes:
        steps = of_each * columns / step
        counts = (math.floor(steps), math.ceil(steps)) if round(steps) else (0,)
        ways.append([columns - n * step for n in (counts if len(sizes) <= _MOST_SIZES else counts[-1:])])

    def bytes_of(begins: Sequence[int]) -> float:
        parts = zip(sizes.values(), begins, strict=True)
        return sum(each.second_bytes(begin) for alike, begin in parts for each in alike)

    enough = [begins for begins in itertools.product(*ways) if bytes_of(begins) >= wanted_bytes]
    begins = min(enough or [tuple(way[-1] for way in ways)], key=bytes_of)
    return {
        each.result: TiledTensor(each.axis, (0, begin, each.columns))
        for alike, begin in zip(sizes.values(), begins, strict=True)
        for each in alike
    }


# ------------------------------------------------------------------------------ what the parts read


def _with_own_operands(program: Program, second: Collection[str]) -> SideBySide:
    """Second parts read copies of the cheap operators that depend on parts; what is read by them alone then
    runs beside them."""
    values = {binding.var: binding.value for binding in program.bindings}
    depends = _dependents(program)
    builder = ProgramBuilder(program.inputs)
    first = builder.take_parameters(program)
    own: dict[relax.Var, relax.Expr] = {}
    second_weights: set[str] = set()

    def beside(var: relax.Var) -> relax.Expr:
        """What a second part reads instead of a variable."""
        for each in _copied(var, depends, values, own):
            value = substitute(values[each], lambda v: own.get(v, first[v]))
            own[each] = builder.emit(value, program.origins[each.name], each.name)
        return own.get(var, first[var])

    for binding in program.bindings:
        is_second = binding.var.name in second
        value = substitute(binding.value, beside if is_second else first.__getitem__)
        first[binding.var] = builder.emit(value, program.origins[binding.var.name], binding.var.name)
        if is_second and not has_fact(binding.value, Fact.ELEMENTWISE):
            second_weights.update(v.name for v in variables(value) if v.name in builder.weights)
    outputs = [substitute(output, first.__getitem__) for output in program.outputs]
    return SideBySide(builder.finish(outputs, program.functions), frozenset(second_weights))


def _dependents(program: Program) -> set[relax.Var]:
    """Concatenated parts, and what cheap operators make of them."""
    parts: set[relax.Var] = set()
    found: set[relax.Var] = set()
    for binding in program.bindings:
        var, value = binding.var, binding.value
        if var.name.endswith((".band0", ".band1")):  # of `emit_tiles`
            parts.add(var)
        elif (is_op(value, "concat") and parts.issuperset(variables(value))) or (
            _is_cheap(value) and not found.isdisjoint(variables(value))
        ):
            found.add(var)
    return found


def _is_cheap(value: relax.Expr) -> bool:
    return isinstance(value, relax.TupleGetItem) or (
        isinstance(value, relax.Call)
        and (has_fact(value, Fact.ELEMENTWISE | Fact.VIEW) or operator_name(value) in _CHEAP)
    )


def _copied(
    var: relax.Var, depends: set[relax.Var], values: dict[relax.Var, relax.Expr], own: Collection[relax.Var]
) -> Iterator[relax.Var]:
    """What has to be there a second time for a variable, and is not yet, in an order in which it can be."""
    order: dict[relax.Var, None] = {}
    queue = [var]
    while queue:
        each = queue.pop()
        if each in depends and each not in own:
            order.pop(each, None)
            order[each] = None
            queue.extend(variables(values[each]))
    yield from reversed(order)
