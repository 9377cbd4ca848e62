"""Tile: a kernel that needs more memory than there is becomes several, each of which computes a band.

Every tensor of a region becomes some tensors of its own, its *bands* along one axis: samples of a batch, rows
of an image or a matrix, or channels. Operators become calls on bands. Where a window reaches over the border
of a band, a *halo* puts the border rows of the neighbours, or zeros, on both sides of it; `fuse` makes it
part of the convolution that reads it. So no tensor of the region is ever whole. Where it begins tensors are
cut up, where it ends they are put together.

The bands are listed in the order in which the region's results need them, not layer by layer: only a few of
each tensor are live at a time. (Depth-first execution of patches: Alwani et al., "Fused-layer CNN
accelerators", MICRO 2016; here border rows are kept and not computed twice.)

A training step first goes through its batch in parts, functions and all (passes/batches.py); what is still
too large is then cut up as in any network. passes/regions.py chooses what is in bands, passes/bands.py how
many there are, passes/shares.py knows how an operator computes one; this file writes the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir.expr import GenericConst

from hybridc.passes.bands import Bands, Facts, concats_in_readers
from hybridc.passes.batches import split_batch
from hybridc.passes.program import (
    Program,
    ProgramBuilder,
    content_number,
    part_name,
    substitute,
    tensor_dtype,
    tensor_shape,
    weight_part,
)
from hybridc.passes.regions import choose_bands
from hybridc.passes.shares import Operation, Part, Share, share_of
from hybridc.passes.stacked import Piece, stacked
from hybridc.passes.working_set import largest_working_set_bytes

MAX_ROUNDS = 3
"""Bands that are still too large are cut again, along another axis: batches, then rows, then channels."""

MAX_CALLS = 4000
"""Of operators on bands, in one round: with more, launches would cost more than a slower device."""


def tile(program: Program, limit_bytes: int) -> Program:
    """Cut kernels up until the working set of each is within `limit_bytes`, as far as that is possible.

    Requires: `main` canonical.
    Ensures: the same results up to rounding, inputs and outputs as they were; the program itself where no
    kernel exceeds the limit. Band i of `v` is called `v.band{i}` and has the origins of `v`.
    Raises: nothing of its own.
    """
    whole, program = program, split_batch(program, limit_bytes)
    in_parts = program is not whole
    for i in range(MAX_ROUNDS):
        bands = choose_bands(program, limit_bytes, again=in_parts or i > 0)
        if not bands or sum(len(b.spans) for b in bands.values()) > MAX_CALLS:
            break
        finer = write_bands(program, bands)
        if in_parts and largest_working_set_bytes(finer) >= largest_working_set_bytes(program):
            break  # what puts its bands together is larger than the kernels
        program = finer
    return program


def write_bands(program: Program, bands: dict[relax.Var, Bands]) -> Program:
    """The program with these bindings in bands."""
    writer = _Writer(program, bands)
    for binding in program.bindings:
        if binding.var not in bands:
            writer.write_whole(binding)
    outputs = [substitute(output, writer.whole) for output in program.outputs]
    functions = {**program.functions, **dict(writer.functions.values())}
    return writer.builder.finish(outputs, functions)


Band = tuple[relax.Var, int]
Source = tuple[relax.Var, int | None]
"""A tensor of the program: a band of it, or all."""


@dataclass
class _Writer:
    program: Program
    bands: dict[relax.Var, Bands]
    builder: ProgramBuilder = field(init=False)
    new: dict[Source, relax.Expr] = field(default_factory=dict)
    """What is written already."""
    operations: dict[relax.Var, Operation] = field(init=False)
    shares: dict[Band, Share] = field(init=False)
    unwritten: set[relax.Var] = field(init=False)
    """Concatenations that convolutions do while they read."""
    edges: dict[Band, list[tuple[int, int]]] = field(init=False)
    """The rows of each band, counted in the tensor, that the halos of its neighbours take."""
    written_edges: dict[object, relax.Expr] = field(default_factory=dict)
    functions: dict[object, tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = field(default_factory=dict)
    parts: dict[tuple[relax.Expr, Part], relax.Expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder = ProgramBuilder(self.program.inputs)
        for var, new in self.builder.take_parameters(self.program).items():
            self.new[var, None] = new
        operations = Facts(self.program).operations
        self.operations = {var: o for var, o in operations.items() if o is not None and var in self.bands}
        self.shares = {
            (var, i): _share(self.operations[var], bands.axis, span)
            for var, bands in self.bands.items()
            for i, span in enumerate(bands.spans)
        }
        self.unwritten = concats_in_readers(self.program, {v: b.axis for v, b in self.bands.items()})
        self.edges = {}
        for (var, _), share in self.shares.items():
            for operand, part in zip(self.operations[var].operands, share.parts, strict=True):
                self._note_edges(operand, part)

    def _note_edges(self, operand: relax.Expr, part: Part | None) -> None:
        if operand in self.unwritten:
            for joined in self.operations[operand].operands:
                self._note_edges(joined, part)
            return
        pieces = self._pieces(operand, part) if part is not None else []
        sources = [source for source, _, _ in pieces]
        if len(sources) < 2:
            return
        for (var, i), begin, end in pieces:
            if i is not None and (begin, end) != self.bands[var].spans[i]:
                spans = self.edges.setdefault((var, i), [])
                if (begin, end) not in spans:
                    spans.append((begin, end))

    def _pieces(self, operand: relax.Expr, part: Part) -> list[tuple[Source, int, int]]:
        """Where to find the rows of a part: sources, and what to take of each, counted in the tensor."""
        begin, end = max(part.begin, 0), min(part.end, tensor_shape(operand)[part.axis])
        bands = self.bands.get(operand)
        if bands is None or bands.axis != part.axis:
            return [((operand, None), begin, end)]
        return [
            ((operand, i), max(begin, first), min(end, last))
            for i, (first, last) in enumerate(bands.spans)
            if first < end and begin < last
        ]

    # ------------------------------------------------------------------------------ in which order

    def write_whole(self, binding: relax.VarBinding) -> None:
        """A binding that stays as it is."""
        value = substitute(binding.value, self.whole)
        origins = self.program.origins[binding.var.name]
        self.new[binding.var, None] = self.builder.emit(value, origins, binding.var.name)

    def whole(self, var: relax.Var) -> relax.Expr:
        """All of a tensor, put together if it is in bands."""
        if (var, None) not in self.new:
            bands = self.bands[var]
            parts = [self._band(var, i) for i in range(len(bands.spans))]
            joined = relax.op.concat(parts, axis=bands.axis)
            self.new[var, None] = self.builder.emit(joined, self._origins(var), var.name)
        return self.new[var, None]

    def _band(self, var: relax.Var, band: int) -> relax.Expr:
        """A band, after all that it needs; without recursion, which deep networks would exhaust."""
        stack: list[tuple[Band, Iterator[Band]]] = [((var, band), self._needed((var, band)))]
        while stack:
            wanted, needed = stack[-1]
            missing = next((n for n in needed if n not in self.new), None)
            if missing is not None:
                stack.append((missing, self._needed(missing)))
                continue
            stack.pop()
            if wanted not in self.new:
                self._write(*wanted)
        return self.new[var, band]

    def _needed(self, band: Band) -> Iterator[Band]:
        for operand, part in zip(self.operations[band[0]].operands, self.shares[band].parts, strict=True):
            yield from self._needed_for(operand, part)

    def _needed_for(self, operand: relax.Expr, part: Part | None) -> Iterator[Band]:
        if operand in self.unwritten:
            for joined in self.operations[operand].operands:
                yield from self._needed_for(joined, part)
        elif operand in self.bands:
            if part is None or part.axis != self.bands[operand].axis:
                yield from ((operand, i) for i in range(len(self.bands[operand].spans)))
            else:
                yield from ((var, i) for (var, i), _, _ in self._pieces(operand, part) if i is not None)

    def _write(self, var: relax.Var, band: int) -> None:
        share, name = self.shares[var, band], f"{var.name}.band{band}"
        origins = self.program.origins[var.name]
        operands = [
            self._read(operand, part, origins)
            for operand, part in zip(self.operations[var].operands, share.parts, strict=True)
        ]

        def emit(expr: relax.Expr) -> relax.Expr:
            return self.builder.emit(expr, origins, name)

        self.new[var, band] = emit(share.make(operands, emit))

    # ----------------------------------------------------------------------------- what is read

    def _read(self, operand: relax.Expr, part: Part | None, origins: Sequence[str]) -> relax.Expr:
        """A part of an operand; all of it if there is none."""
        if not isinstance(operand, relax.Var | GenericConst):
            return operand
        if operand in self.unwritten:
            concat = self.operations[operand]
            read = [self._read(joined, part, origins) for joined in concat.operands]
            joined = relax.op.concat(read, axis=int(concat.call.attrs.axis))
            return self.builder.emit(joined, self._origins(operand), operand.name)
        value = self._known(operand)
        if part is None or (value is None and _is_all(operand, part) and operand not in self.bands):
            return operand if isinstance(operand, GenericConst) else self.whole(operand)
        if (operand, part) not in self.parts:
            read = self._gather(operand, part, origins) if value is None else self._cut(operand, value, part)
            self.parts[operand, part] = read
        return self.parts[operand, part]

    def _known(self, operand: relax.Expr) -> np.ndarray | None:
        if isinstance(operand, GenericConst):
            return operand.value.numpy()
        return self.program.weights.get(operand.name)

    def _cut(self, operand: relax.Expr, value: np.ndarray, part: Part) -> relax.Var:
        """A part of a weight is a weight."""
        extent = value.shape[part.axis]
        taken = weight_part(value, part.axis, max(part.begin, 0), min(part.end, extent))
        if part.begin < 0 or part.end > extent:
            widths = [(0, 0)] * value.ndim
            widths[part.axis] = max(-part.begin, 0), max(part.end - extent, 0)
            taken = np.pad(taken, widths)
        name = part_name(operand, part.axis, part.begin, part.end)
        if isinstance(operand, GenericConst):
            taken = taken.copy()  # `value` is one that nothing else would keep
        return self.builder.weight(taken, name)

    def _gather(self, operand: relax.Var, part: Part, origins: Sequence[str]) -> relax.Expr:
        """Rows of one or several bands, or of a whole tensor, one behind the other, with zeros around."""
        found = self._pieces(operand, part)
        sources: list[relax.Expr] = []
        pieces: list[Piece] = []
        for source, begin, end in found:
            tensor, first = self._source(source, begin, end, alone=len(found) == 1)
            pieces.append(Piece(len(sources), begin - first, end - first))
            sources.append(tensor)
        below, above = found[0][1] - part.begin, part.end - found[-1][2]
        pieces = [
            *([Piece(None, 0, below)] if below else []),
            *pieces,
            *([Piece(None, 0, above)] if above else []),
        ]
        extent = tensor_shape(sources[0])[part.axis]
        if pieces == [Piece(0, 0, extent)]:
            return sources[0]
        # `fuse` makes a halo part of the convolution that reads it, which must not read a whole tensor
        kind = "rows" if found[0][0][1] is None else "halo"
        return self._stack(sources, pieces, part.axis, origins, kind)

    def _source(self, source: Source, begin: int, end: int, *, alone: bool) -> tuple[relax.Expr, int]:
        """A tensor with these rows, and the index that its first row would have if it held all before them.

        Border rows come from a tensor of their own, so that the band need not be kept for its neighbours.
        """
        var, band = source
        if band is None:
            return self.whole(var), 0
        first, last = self.bands[var].spans[band]
        spans = tuple(self.edges.get((var, band), ()))
        for edges in (spans, ((begin, end),)):
            if not alone and (begin, end) in edges and 2 * sum(e - b for b, e in edges) <= last - first:
                before = sum(e - b for b, e in edges[: edges.index((begin, end))])
                return self._edges(var, band, edges), begin - before
        return self.new[var, band], first

    def _edges(self, var: relax.Var, band: int, spans: tuple[tuple[int, int], ...]) -> relax.Expr:
        if (var, band, spans) not in self.written_edges:
            bands = self.bands[var]
            first, _ = bands.spans[band]
            pieces = [Piece(0, begin - first, end - first) for begin, end in spans]
            edges = self._stack([self.new[var, band]], pieces, bands.axis, self._origins(var), "rows")
            self.written_edges[var, band, spans] = edges
        return self.written_edges[var, band, spans]

    def _stack(
        self,
        sources: Sequence[relax.Expr],
        pieces: Sequence[Piece],
        axis: int,
        origins: Sequence[str],
        kind: str,
    ) -> relax.Expr:
        if len(pieces) == 1:
            [piece] = pieces
            sliced = relax.op.strided_slice(sources[0], [axis], [piece.begin], [piece.end])
            return self.builder.emit(sliced, origins, kind)
        shapes, dtype = tuple(tensor_shape(s) for s in sources), tensor_dtype(sources[0])
        key = kind, shapes, tuple(pieces), axis, dtype
        if key not in self.functions:
            name = tvm.ir.GlobalVar(f"{kind}_{content_number(repr(key).encode())}")
            function = stacked(shapes, pieces, axis, dtype).with_attr("global_symbol", name.name_hint)
            relax.expr._update_type(name, function.ty)
            self.functions[key] = name, function
        rows = sum(piece.extent for piece in pieces)
        shape = (*shapes[0][:axis], rows, *shapes[0][axis + 1 :])
        call = relax.call_tir(self.functions[key][0], list(sources), relax.TensorType(shape, dtype))
        return self.builder.emit(call, origins, kind)

    def _origins(self, var: relax.Var) -> Sequence[str]:
        return self.program.origins[var.name]


def _share(operation: Operation, axis: int, span: tuple[int, int]) -> Share:
    share = share_of(operation, axis, *span)
    assert share is not None, operation.call
    return share


def _is_all(operand: relax.Expr, part: Part) -> bool:
    return (part.begin, part.end) == (0, tensor_shape(operand)[part.axis])
