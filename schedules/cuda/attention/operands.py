"""Keys and values on their way to tensor cores, as right factors of both products."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cuda.core.kernel import integer
from hybridc.schedules.cuda.tensor_core.read import Axis, Element, flattened
from hybridc.schedules.cuda.tensor_core.staging import CHUNK_BYTES, Operand, widest_load

_CHUNK = CHUNK_BYTES // 2


def pitch_of(line: int) -> int:
    """Elements from one line of so many to the next in shared memory."""
    return (line // _CHUNK | 1) * _CHUNK


@dataclass(frozen=True, slots=True)
class PaddedOperand(Operand):
    """Lines of any number of chunks: an odd number of them from one line to the next, so that eight lines'
    chunks lie in different banks."""

    @property
    def pitch(self) -> int:
        """Elements from one line in shared memory to the next."""
        return pitch_of(self.line)

    @property
    def elements(self) -> int:
        return self.extent * self.step // self.line * self.pitch

    def offset(self, line: ir.Expr, at: ir.Expr) -> ir.Expr:
        return line * integer(self.pitch) + at


def keys_operand(
    found: AttentionBlocks, batch: list[ir.Expr], keys: int, depth: int, threads: int
) -> Operand:
    """A tile of so many keys and all of the depth, padded to `depth`, as the right factor of the scores."""
    position, number, inner = _variables("key")
    load = found.factor("scores", 1, (*batch, integer(0), position), number * integer(depth) + inner)
    axes = Axis((), (found.columns,)), Axis((), (found.depth,))
    return _operand("keys", load, (position, number, inner), axes, (keys, depth), threads)


def values_operand(
    found: AttentionBlocks, batch: list[ir.Expr], keys: int, width: int, threads: int
) -> Operand:
    """The same of the values, whose depth are the keys: slices of `keys`."""
    position, number, inner = _variables("value")
    load = found.factor("context", 1, (*batch, integer(0), position), number * integer(keys) + inner)
    axes = Axis((), (found.width,)), Axis((), (found.columns,))
    return _operand("values", load, (position, number, inner), axes, (width, keys), threads)


def _variables(name: str) -> tuple[ir.Var, ir.Var, ir.Var]:
    position, number, inner = (tirx.Var(f"{name}_{axis}", "int64") for axis in ("position", "slice", "depth"))
    return position, number, inner


def _operand(
    name: str,
    load: ir.TensorLoad,
    variables: tuple[ir.Var, ir.Var, ir.Var],
    axes: tuple[Axis, Axis],
    tile: tuple[int, int],
    threads: int,
) -> Operand:
    (position, number, inner), (positions, depth), (extent, step) = variables, axes, tile
    known = sym.Analyzer()
    for variable, size in (
        (position, positions.extent),
        (number, -(-depth.extent // step)),
        (inner, step),
    ):
        known.bind(variable, ir.Range.from_min_extent(integer(0), integer(size)))
    element = Element((), flattened(load, known))
    widths = {
        True: widest_load(element, inner, depth.extent, _CHUNK),
        False: widest_load(element, position, positions.extent, _CHUNK),
    }
    along_depth = widths[True] > widths[False]
    return PaddedOperand(
        name, element, position, number, inner, positions, depth, extent, step, threads, along_depth,
        widths[along_depth],
    )  # fmt: skip
