"""What a thread has in registers, and a block in shared memory."""

from __future__ import annotations

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cuda.tensor_core_winograd.plan import CHANNELS, PAIRS
from hybridc.schedules.cuda.tile.access import WIDTH
from hybridc.schedules.cuda.winograd.plan import OUTPUTS, POINTS, SIDE
from hybridc.schedules.cuda.winograd.read import TAPS
from hybridc.schedules.shapes import index_shape

REGISTERS = 4
"""Of a lane: a fragment of taps, or two of patches."""
SPAN = SIDE + OUTPUTS
"""Columns that two neighbouring tiles read."""
CHUNK = 4
"""Words of a row of a matrix, which `ldmatrix` reads at a time."""
LINE = PAIRS // CHUNK
"""Chunks of a channel at a point: half of the banks."""
POINT_WORDS = CHANNELS * PAIRS
STAGES = 2


def buffer(name: str, size: int, dtype: str, scope: str) -> ir.Var:
    return tirx.decl_buffer(index_shape((size,)), dtype, name, scope=scope, layout=None)


class Arrays:
    """Of a thread in registers, and of a block in shared memory."""

    def __init__(self) -> None:
        self.sums = buffer("sums", POINTS * 2 * REGISTERS, "float32", "local")
        self.patches = buffer("patches_loaded", SIDE * 2 * WIDTH, "float32", "local")
        self.ends = buffer("ends", SIDE - 1, "float32", "local")
        self.half = buffer("half", SIDE * SPAN, "float32", "local")
        self.line = buffer("line", OUTPUTS, "float32", "local")
        self.words = buffer("words", 2, "uint32", "local")
        self.taps = buffer("taps", TAPS * TAPS * REGISTERS, "uint32", "local")
        self.plus = buffer("plus", TAPS * REGISTERS, "uint32", "local")
        self.minus = buffer("minus", TAPS * REGISTERS, "uint32", "local")
        self.plus_twice = buffer("plus_twice", REGISTERS, "uint32", "local")
        self.minus_twice = buffer("minus_twice", REGISTERS, "uint32", "local")
        self.data = buffer("data", REGISTERS, "uint32", "local")
        self.results = buffer("outputs", OUTPUTS * 2 * OUTPUTS, "float32", "local")
        self.shared = buffer("points", STAGES * POINTS * POINT_WORDS, "uint32", "shared")

    @property
    def written_by_instructions(self) -> list[ir.Var]:
        return [self.sums, self.words, self.plus, self.minus, self.plus_twice, self.minus_twice, self.data]

    @property
    def all(self) -> list[ir.Var]:
        return [*vars(self).values()]


def word_at(stage: ir.Expr, channel: ir.Expr, chunk: ir.Expr) -> ir.Expr:
    """Where a chunk of a channel begins at the first point of a stage of shared memory: chunks of two lines,
    which lie side by side in the banks, are rotated by their number."""
    turned = tirx.floormod(chunk + tirx.floordiv(channel, integer(2)), integer(LINE))
    line = stage * integer(POINTS * POINT_WORDS) + channel * integer(PAIRS)
    return line + turned * integer(CHUNK)
