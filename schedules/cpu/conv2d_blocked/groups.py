"""How the channels of a grouped convolution fill vectors and blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridc.targets import Isa

LEAST_CHANNELS = 4
"""Input channels that a task copies as one vector: with fewer, the copy would cost as much as the sums."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Vectors of `lanes` output channels, and what they sum over.

    Groups of `lanes` outputs and more have vectors of their own, which sum over `inputs` broadcast scalars;
    half of the last one may be left over, whose sums are not stored. Of narrower groups, several share a
    vector: each of its `inputs` steps spreads one channel of every such group over that group's lanes.
    """

    inputs: int
    outputs: int
    lanes: int
    block: int
    """Channels of a block of the input."""
    output_block: int
    """And of one of the output."""

    @property
    def narrow(self) -> bool:
        """Whether several groups share a vector."""
        return self.outputs < self.lanes

    @property
    def vectors(self) -> int:
        """Those of a group that is not narrow."""
        return -(-self.outputs // self.lanes)

    @property
    def is_filled(self) -> bool:
        """Whether vectors are stored in parts: those of a block, and of a group's last one those that are
        outputs."""
        return self.stored < self.lanes

    @property
    def stored(self) -> int:
        """Lanes that lie side by side in a block of the output, and of which all are of a group or none."""
        return self.lanes if self.narrow else math.gcd(self.outputs, self.lanes, self.output_block)

    @property
    def channels(self) -> int:
        """Input channels that a vector reads."""
        return self.inputs * max(self.lanes // self.outputs, 1)

    @property
    def input_lanes(self) -> int:
        """What these are read and copied in: as many as lie side by side for every vector."""
        return math.gcd(self.channels, self.block)

    @property
    def spread(self) -> tuple[int, ...]:
        """The lane of the input that each lane of sums takes in the first step of narrow groups."""
        return tuple(lane // self.outputs * self.inputs for lane in range(self.lanes))


def grouping(inputs: int, outputs: int, input_block: int, output_block: int, isa: Isa) -> Grouping | None:
    """For groups of so many channels and blocks of so many; None if vectors and groups do not fit together.

    Whole vectors come first, even if groups would fill half ones: some processors do both halves at once, and
    a group of 24 channels takes two whole ones instead of three halves.
    """
    for lanes in (isa.lanes(), isa.lanes() // 2) if isa.lanes() > 8 else (isa.lanes(),):
        found = Grouping(inputs, outputs, lanes, input_block, output_block)
        if found.narrow:
            fits = output_block % lanes == lanes % outputs == input_block % found.channels == 0
        else:
            fits = 2 * found.stored >= lanes and found.input_lanes >= min(LEAST_CHANNELS, inputs)
        if fits:
            return found
    return None
