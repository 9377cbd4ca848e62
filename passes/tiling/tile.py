"""Stage `tile`: a kernel that needs more memory than there is becomes several, each of which computes a tile.

Every tensor of a region becomes several tensors, its *tiles* along one axis: samples of a batch, rows of an
image or a matrix, or channels. Operators become calls on tiles. Where a window reaches over the border of a
tile, a *halo* concatenates the border rows of the neighbours, or zeros, on both sides of it; `fuse` makes it
part of the convolution that reads it. So no tensor inside a region is ever whole. Where a region begins
tensors are sliced, where it ends their tiles are concatenated.

Tiles are listed in the order in which the results of the region need them, not layer by layer: only a few of
each tensor are live at a time. (Depth-first execution of patches: Alwani et al., "Fused-layer CNN
accelerators", MICRO 2016; here border rows are kept and not computed twice.)

A training step is first split into micro-batches, functions and all (batch/split_batch.py); what is still too
large is then tiled as in any network. regions.py chooses what is tiled, tile_sizes.py how many tiles there
are, slice_rules.py knows how an operator computes one; this file writes the program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir.expr import GenericConst

from hybridc.passes.fuse.attention import Suits, any_attention
from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import (
    Program,
    ProgramBuilder,
    content_number,
    part_name,
    substitute,
    tensor_dtype,
    tensor_shape,
    weight_part,
)
from hybridc.passes.tiling.batch.split_batch import split_batch
from hybridc.passes.tiling.concat_slices import SourceSlice, concat_slices
from hybridc.passes.tiling.limits import MAX_CALLS
from hybridc.passes.tiling.regions import choose_tiled_tensors
from hybridc.passes.tiling.slice_rules import Operation, Slice, SliceRule, slice_of
from hybridc.passes.tiling.tile_sizes import TensorFacts, TiledTensor, concats_in_readers
from hybridc.passes.tiling.working_set import largest_working_set_bytes

MAX_ROUNDS = 3
"""Tiles that are still too large are tiled again, along another axis: batches, then rows, then channels."""


def tile(program: Program, limit_bytes: int, suits: Suits = any_attention) -> Program:
    """Tile kernels until the working set of each is within `limit_bytes`, as far as that is possible.

    Requires: `main` canonical; attention that `suits` is to be one kernel.
    Ensures: the same results up to rounding, inputs and outputs as they were; the program itself where no
    kernel exceeds the limit. Tile i of `v` is called `v.band{i}` and has the origins of `v`.
    Raises: nothing of its own.
    """
    whole, program = program, split_batch(program, limit_bytes)
    is_split = program is not whole
    for i in range(MAX_ROUNDS):
        tiled = choose_tiled_tensors(program, limit_bytes, suits, again=is_split or i > 0)
        if not tiled or sum(len(t.spans) for t in tiled.values()) > MAX_CALLS:
            break
        finer = emit_tiles(program, tiled)
        if is_split and largest_working_set_bytes(finer, suits) >= largest_working_set_bytes(program, suits):
            break  # what concatenates its tiles is larger than the kernels
        program = finer
    return program


def emit_tiles(
    program: Program, tiled: dict[relax.Var, TiledTensor], apart: Collection[relax.Var] = ()
) -> Program:
    """The program with these bindings tiled. Requires: every tile can be computed (`slice_of`).

    `apart` are inputs and outputs among them whose tiles are inputs and outputs of their own, which nothing
    reads as a whole: the first tile of each has its position, the others stand behind all of them.
    """
    emitter = _TileEmitter(program, tiled, apart)
    for binding in program.bindings:
        if binding.var not in tiled:
            emitter.emit_whole(binding)
    outputs: list[relax.Expr] = []
    behind: list[relax.Expr] = []
    for output in program.outputs:
        if output in apart:
            first, *others = emitter.tiles(output)
            outputs.append(first)
            behind += others
        else:
            outputs.append(substitute(output, emitter.whole))
    return emitter.builder.finish([*outputs, *behind], dict(emitter.functions.values()))


Tile = tuple[relax.Var, int]
"""A tensor of the program and the number of one of its tiles."""
TileSource = tuple[relax.Var, int | None]
"""A tensor of the program: the tile of this number, or None for the whole tensor."""


@dataclass
class _TileEmitter:
    program: Program
    tiled: dict[relax.Var, TiledTensor]
    apart: Collection[relax.Var]
    builder: ProgramBuilder = field(init=False)
    new: dict[TileSource, relax.Expr] = field(default_factory=dict)
    """What is emitted already."""
    operations: dict[relax.Var, Operation] = field(init=False)
    rules: dict[Tile, SliceRule] = field(init=False)
    unwritten: set[relax.Var] = field(init=False)
    """Concatenations that convolutions do while they read."""
    edges: dict[Tile, list[tuple[int, int]]] = field(init=False)
    """The rows of each tile, counted in the whole tensor, that the halos of its neighbours read."""
    written_edges: dict[object, relax.Expr] = field(default_factory=dict)
    functions: dict[str, tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = field(init=False)
    """By name: those that the program has, of earlier rounds too, and new ones."""
    slices: dict[tuple[relax.Expr, Slice, relax.Var | None], relax.Expr] = field(default_factory=dict)
    """What is read of an operand; halos by the convolution that they become part of."""

    def __post_init__(self) -> None:
        parts = {var: self._input_tiles(var) for var in self.program.inputs}
        behind = [part for tiles in parts.values() for part in tiles[1:]]
        self.builder = ProgramBuilder([*(tiles[0] for tiles in parts.values()), *behind])
        self.functions = {g.name_hint: (g, f) for g, f in self.program.functions.items()}
        for var, new in self.builder.take_parameters(self.program).items():
            self.new[var, None] = new
        for var in self.program.inputs:
            if var in self.apart:
                del self.new[var, None]
                self.new.update({(var, i): part for i, part in enumerate(parts[var])})
        operations = TensorFacts(self.program).operations
        self.operations = {var: o for var, o in operations.items() if o is not None and var in self.tiled}
        self.rules = {
            (var, i): _slice_rule(self.operations[var], tiled.axis, span)
            for var, tiled in self.tiled.items()
            if var in self.operations
            for i, span in enumerate(tiled.spans)
        }
        self.unwritten = concats_in_readers(self.program, {v: b.axis for v, b in self.tiled.items()})
        self.edges = {}
        for (var, _), rule in self.rules.items():
            for operand, sliced in zip(self.operations[var].operands, rule.slices, strict=True):
                self._note_edges(operand, sliced)

    def _input_tiles(self, var: relax.Var) -> list[relax.Var]:
        """What is fed in the place of an input: itself, unless its tiles are inputs of their own."""
        if var not in self.apart:
            return [var]
        tiled, shape = self.tiled[var], tensor_shape(var)
        shapes = [(*shape[: tiled.axis], e - b, *shape[tiled.axis + 1 :]) for b, e in tiled.spans]
        types = [relax.TensorType(each, tensor_dtype(var)) for each in shapes]
        return [relax.Var(tile_name(var, i), each) for i, each in enumerate(types)]

    def _note_edges(self, operand: relax.Expr, sliced: Slice | None) -> None:
        if operand in self.unwritten:
            for joined in self.operations[operand].operands:
                self._note_edges(joined, sliced)
            return
        slices = self._tiles_of(operand, sliced) if sliced is not None else []
        sources = [source for source, _, _ in slices]
        if len(sources) < 2:
            return
        for (var, i), begin, end in slices:
            if i is not None and (begin, end) != self.tiled[var].spans[i]:
                spans = self.edges.setdefault((var, i), [])
                if (begin, end) not in spans:
                    spans.append((begin, end))

    def _tiles_of(self, operand: relax.Expr, sliced: Slice) -> list[tuple[TileSource, int, int]]:
        """The sources of the rows of a slice, and what to take of each, counted in the whole tensor."""
        begin, end = max(sliced.begin, 0), min(sliced.end, tensor_shape(operand)[sliced.axis])
        tiled = self.tiled.get(operand)
        if tiled is None or tiled.axis != sliced.axis:
            return [((operand, None), begin, end)]
        return [
            ((operand, i), max(begin, first), min(end, last))
            for i, (first, last) in enumerate(tiled.spans)
            if first < end and begin < last
        ]

    # ------------------------------------------------------------------------------ in which order

    def emit_whole(self, binding: relax.VarBinding) -> None:
        """Emit a binding that is not tiled."""
        value = substitute(binding.value, self.whole)
        origins = self.program.origins[binding.var.name]
        self.new[binding.var, None] = self.builder.emit(value, origins, binding.var.name)

    def whole(self, var: relax.Var) -> relax.Expr:
        """The whole tensor, concatenated if it is tiled."""
        if (var, None) not in self.new:
            joined = relax.op.concat(self.tiles(var), axis=self.tiled[var].axis)
            self.new[var, None] = self.builder.emit(joined, self._origins(var), var.name)
        return self.new[var, None]

    def tiles(self, var: relax.Var) -> list[relax.Expr]:
        """All tiles of a tensor."""
        return [self._tile(var, i) for i in range(len(self.tiled[var].spans))]

    def _tile(self, var: relax.Var, number: int) -> relax.Expr:
        """A tile, after all that it needs; without recursion, whose limit deep networks would exceed."""
        stack: list[tuple[Tile, Iterator[Tile]]] = [((var, number), self._needed((var, number)))]
        while stack:
            wanted, needed = stack[-1]
            missing = next((n for n in needed if n not in self.new), None)
            if missing is not None:
                stack.append((missing, self._needed(missing)))
                continue
            stack.pop()
            if wanted not in self.new:
                self._write(*wanted)
        return self.new[var, number]

    def _needed(self, tile: Tile) -> Iterator[Tile]:
        for operand, sliced in zip(self.operations[tile[0]].operands, self.rules[tile].slices, strict=True):
            yield from self._needed_for(operand, sliced)

    def _needed_for(self, operand: relax.Expr, sliced: Slice | None) -> Iterator[Tile]:
        if operand in self.unwritten:
            for joined in self.operations[operand].operands:
                yield from self._needed_for(joined, sliced)
        elif operand in self.tiled:
            if sliced is None or sliced.axis != self.tiled[operand].axis:
                yield from ((operand, i) for i in range(len(self.tiled[operand].spans)))
            else:
                yield from ((var, i) for (var, i), _, _ in self._tiles_of(operand, sliced) if i is not None)

    def _write(self, var: relax.Var, number: int) -> None:
        rule, name = self.rules[var, number], tile_name(var, number)
        if rule.function is not None:
            variable, function = rule.function()
            self.functions[variable.name_hint] = variable, function
        origins = self.program.origins[var.name]
        convolution = var if has_fact(self.operations[var].call, Fact.CONVOLUTION) else None
        operands = [
            self._read(operand, sliced, origins, convolution)
            for operand, sliced in zip(self.operations[var].operands, rule.slices, strict=True)
        ]

        def emit(expr: relax.Expr) -> relax.Expr:
            return self.builder.emit(expr, origins, name)

        self.new[var, number] = emit(rule.make(operands, emit))

    # ----------------------------------------------------------------------------- what is read

    def _read(
        self,
        operand: relax.Expr,
        sliced: Slice | None,
        origins: Sequence[str],
        convolution: relax.Var | None,
    ) -> relax.Expr:
        """A slice of an operand; the whole operand for None. A `convolution` has a halo of its own."""
        if not isinstance(operand, relax.Var | GenericConst):
            return operand
        if operand in self.unwritten:
            concat = self.operations[operand]
            read = [self._read(joined, sliced, origins, convolution) for joined in concat.operands]
            joined = relax.op.concat(read, axis=int(concat.call.attrs.axis))
            return self.builder.emit(joined, self._origins(operand), operand.name)
        value = self._known(operand)
        if sliced is None or (value is None and _is_all(operand, sliced) and operand not in self.tiled):
            return operand if isinstance(operand, GenericConst) else self.whole(operand)
        has_halo = value is None and len(self._tiles_of(operand, sliced)) > 1
        key = operand, sliced, convolution if has_halo else None
        if key not in self.slices:
            self.slices[key] = (
                self._gather(operand, sliced, origins)
                if value is None
                else self._weight_slice(operand, value, sliced)
            )
        return self.slices[key]

    def _known(self, operand: relax.Expr) -> np.ndarray | None:
        if isinstance(operand, GenericConst):
            return operand.value.numpy()
        return self.program.weights.get(operand.name)

    def _weight_slice(self, operand: relax.Expr, value: np.ndarray, sliced: Slice) -> relax.Var:
        """A slice of a weight is a weight."""
        extent = value.shape[sliced.axis]
        taken = weight_part(value, sliced.axis, max(sliced.begin, 0), min(sliced.end, extent))
        if sliced.begin < 0 or sliced.end > extent:
            widths = [(0, 0)] * value.ndim
            widths[sliced.axis] = max(-sliced.begin, 0), max(sliced.end - extent, 0)
            taken = np.pad(taken, widths)
        name = part_name(operand, sliced.axis, sliced.begin, sliced.end)
        if isinstance(operand, GenericConst):
            taken = taken.copy()  # a view would keep all of a constant that nothing else needs
        return self.builder.weight(taken, name)

    def _gather(self, operand: relax.Var, sliced: Slice, origins: Sequence[str]) -> relax.Expr:
        """Rows of one or several tiles, or of a whole tensor, concatenated, with zeros for padding."""
        found = self._tiles_of(operand, sliced)
        sources: list[relax.Expr] = []
        slices: list[SourceSlice] = []
        for source, begin, end in found:
            tensor, first = self._source(source, begin, end, alone=len(found) == 1)
            slices.append(SourceSlice(len(sources), begin - first, end - first))
            sources.append(tensor)
        below, above = found[0][1] - sliced.begin, sliced.end - found[-1][2]
        slices = [
            *([SourceSlice(None, 0, below)] if below else []),
            *slices,
            *([SourceSlice(None, 0, above)] if above else []),
        ]
        extent = tensor_shape(sources[0])[sliced.axis]
        if slices == [SourceSlice(0, 0, extent)]:
            return sources[0]
        # `fuse` makes a halo part of the convolution that reads it, which must not read a whole tensor
        kind = "rows" if found[0][0][1] is None else "halo"
        return self._concat(sources, slices, sliced.axis, origins, kind)

    def _source(self, source: TileSource, begin: int, end: int, *, alone: bool) -> tuple[relax.Expr, int]:
        """A tensor with these rows, and the index that its first row would have if it held all before them.

        Border rows come from a tensor of their own, so that the tile need not be kept for its neighbours.
        """
        var, number = source
        if number is None:
            return self.whole(var), 0
        first, last = self.tiled[var].spans[number]
        spans = tuple(self.edges.get((var, number), ()))
        for edges in (spans, ((begin, end),)):
            if not alone and (begin, end) in edges and 2 * sum(e - b for b, e in edges) <= last - first:
                before = sum(e - b for b, e in edges[: edges.index((begin, end))])
                return self._edges(var, number, edges), begin - before
        return self.new[var, number], first

    def _edges(self, var: relax.Var, number: int, spans: tuple[tuple[int, int], ...]) -> relax.Expr:
        if (var, number, spans) not in self.written_edges:
            tiled = self.tiled[var]
            first, _ = tiled.spans[number]
            slices = [SourceSlice(0, begin - first, end - first) for begin, end in spans]
            edges = self._concat([self.new[var, number]], slices, tiled.axis, self._origins(var), "rows")
            self.written_edges[var, number, spans] = edges
        return self.written_edges[var, number, spans]

    def _concat(
        self,
        sources: Sequence[relax.Expr],
        slices: Sequence[SourceSlice],
        axis: int,
        origins: Sequence[str],
        kind: str,
    ) -> relax.Expr:
        if len(slices) == 1:
            rows = relax.op.strided_slice(sources[0], [axis], [slices[0].begin], [slices[0].end])
            return self.builder.emit(rows, origins, kind)
        shapes, dtype = tuple(tensor_shape(s) for s in sources), tensor_dtype(sources[0])
        key = kind, shapes, tuple(slices), axis, dtype
        name = f"{kind}_{content_number(repr(key).encode())}"
        if name not in self.functions:
            function = concat_slices(shapes, slices, axis, dtype).with_attr("global_symbol", name)
            variable = tvm.ir.GlobalVar(name)
            relax.expr._update_type(variable, function.ty)
            self.functions[name] = variable, function
        extent = sum(sliced.extent for sliced in slices)
        shape = (*shapes[0][:axis], extent, *shapes[0][axis + 1 :])
        call = relax.call_tir(self.functions[name][0], list(sources), relax.TensorType(shape, dtype))
        return self.builder.emit(call, origins, kind)

    def _origins(self, var: relax.Var) -> Sequence[str]:
        return self.program.origins[var.name]


def tile_name(var: relax.Var, number: int) -> str:
    """Of a tile of a tensor, if nothing else has this name."""
    return f"{var.name}.band{number}"


def _slice_rule(operation: Operation, axis: int, span: tuple[int, int]) -> SliceRule:
    rule = slice_of(operation, axis, *span)
    assert rule is not None, operation.call
    return rule


def _is_all(operand: relax.Expr, sliced: Slice) -> bool:
    return (sliced.begin, sliced.end) == (0, tensor_shape(operand)[sliced.axis])
