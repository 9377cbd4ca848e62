"""How the operands of a product lie in memory, which decides how threads load them."""

from __future__ import annotations

from dataclasses import replace

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import ceil_div, integer
from hybridc.schedules.cpu.core.nest import substitute
from hybridc.schedules.cuda.core.vectors import first_step
from hybridc.schedules.cuda.tensor_core.gathered import WORD, Gathered
from hybridc.schedules.cuda.tensor_core.instructions import INT8
from hybridc.schedules.cuda.tensor_core.read import Element, MatrixProduct, element_of, flattened
from hybridc.schedules.cuda.tensor_core.staging import CHUNK_BYTES, Operand, widest_load, widest_piece


def operand(
    product: MatrixProduct,
    name: str,
    batch: dict[ir.Var, ir.Expr],
    extent: int,
    threads: int,
    *,
    in_pairs: bool = False,
) -> Operand:
    """The factor `left` or `right` as its elements lie in memory: along the depth, or along the positions.
    `in_pairs` are whether fragments are read so."""
    factor, positions = (product.left, product.row) if name == "left" else (product.right, product.column)
    depth, step, item_bytes = product.depth, product.steps, product.item_bytes
    position, number, inner = (tirx.Var(f"{name}_{axis}", "int64") for axis in ("position", "slice", "depth"))

    def element_in(unit: int) -> Element:
        """Named by its position, and by its place in one of the units that the depth is divided into."""
        known = sym.Analyzer()
        units = ceil_div(depth.extent, unit)
        for variable, size in ((position, positions.extent), (number, units), (inner, unit)):
            known.bind(variable, ir.Range.from_min_extent(integer(0), integer(size)))
        point = {**batch, **positions.at(position), **depth.at(number * integer(unit) + inner)}
        return element_of(flattened(substitute(factor.value, point), known), known)

    element = element_in(step)
    widest = min(CHUNK_BYTES // product.memory_bytes(factor), extent * step // threads)

    def loaded(kind: type[Operand], width: int, *, along_depth: bool, in_pairs: bool = in_pairs) -> Operand:
        return kind(
            name, element, position, number, inner, positions, depth, extent, step, threads, along_depth,
            width, item_bytes, factor.dtype, factor.adds_128, factor.rounds, in_pairs,
        )  # fmt: skip

    def gathered(width: int, *, in_pairs: bool = in_pairs) -> Operand:
        made = loaded(Gathered, width, along_depth=True, in_pairs=in_pairs)
        return replace(made, element=element_in(made.unit))

    widths = {
        True: widest_load(element, inner, depth.extent, widest),
        False: widest_load(element, position, positions.extent, widest),
    }
    piece = 1 if widths[True] == widest else widest_piece(element_in, inner, depth.extent, step, widest)
    if piece > max(widths.values()):
        made = loaded(Operand, piece, along_depth=True)
        return replace(made, element=element_in(piece), in_pieces=True)
    if product.dtype == INT8 and widths[True] < WORD:
        if widths[False] >= WORD:
            return gathered(WORD, in_pairs=True)
        return gathered(1)
    if product.dtype == INT8 or max(widths.values()) > 1:
        along_depth = product.dtype == INT8 or widths[True] > widths[False]
        return loaded(Operand, widths[along_depth], along_depth=along_depth)
    # single elements: the warp goes along what lies closer together in memory
    offset, axes = element.load.indices[-1], (position, number, inner)
    by_position, by_depth = (abs(first_step(offset, axis, axes)) for axis in (position, inner))
    if 0 < by_depth < by_position:
        return loaded(Operand, 1, along_depth=True)
    return loaded(Operand, 1, along_depth=False) if item_bytes > 2 else gathered(1)
