"""Groups of a grouped convolution, and how many must be merged so that they fit vectors and blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridc.passes.layout.state import lanes_of
from hybridc.schedules.cpu.conv2d_blocked.groups import Grouping, grouping
from hybridc.targets import Isa


@dataclass(frozen=True, slots=True)
class Groups:
    """Weights `[O, C, KH, KW]` of `count` groups: each output sums over the C inputs of its group."""

    weight: np.ndarray
    count: int

    @property
    def inputs(self) -> int:
        """Channels that a group reads."""
        return int(self.weight.shape[1])

    @property
    def outputs(self) -> int:
        """Channels that a group computes."""
        return len(self.weight) // self.count

    def joined(self, number: int) -> Groups:
        """The same convolution with each `number` groups merged; weights between different old groups are
        zero.

        NaN and infinities then spread to all outputs of a merged group.
        """
        outputs, inputs, *taps = self.weight.shape
        wide = np.zeros((outputs, number, inputs, *taps), self.weight.dtype)
        every = np.arange(outputs)
        wide[every, every // self.outputs % number] = self.weight
        return Groups(wide.reshape(outputs, number * inputs, *taps), self.count // number)

    def filled(self, lanes: int) -> np.ndarray:
        """The weights with zero outputs appended up to a multiple of `lanes`."""
        outputs = len(self.weight)
        filled = np.zeros((-(-outputs // lanes) * lanes, *self.weight.shape[1:]), self.weight.dtype)
        filled[:outputs] = self.weight
        return filled


def joining(groups: Groups, input_lanes: int, isa: Isa) -> tuple[int, int, float]:
    """How many groups to merge for blocks of `input_lanes` channels, the result's block size, and how much
    longer products take than those of the groups as they are would in whole vectors: the least there is."""
    outputs = len(groups.weight)
    widths = tuple(dict.fromkeys((lanes_of(outputs, isa), 8)))
    found = [(groups.count, widths[0], float(groups.count))]
    for number in (n for n in range(1, groups.count) if groups.count % n == 0):
        for lanes in widths:
            fitting = grouping(number * groups.inputs, number * groups.outputs, input_lanes, lanes, isa)
            if fitting is not None and _fit(groups, number, input_lanes, lanes):
                found.append((number, lanes, number * _share_of_vectors(fitting, isa)))
    return min(found, key=lambda each: (each[2], each[0]))


def _share_of_vectors(found: Grouping, isa: Isa) -> float:
    """Lanes of the processor that are busy for an output: half a vector takes as long as a whole one."""
    used = found.lanes if found.narrow else found.outputs / found.vectors
    return isa.lanes() / used


def _fit(groups: Groups, number: int, input_lanes: int, lanes: int) -> bool:
    """Whether the padding of the last blocks consists of whole groups, whose inputs exist."""
    inputs, outputs = groups.count * groups.inputs, len(groups.weight)
    filled_inputs, filled_outputs = -(-inputs // input_lanes) * input_lanes, -(-outputs // lanes) * lanes
    count, rest = divmod(filled_outputs, number * groups.outputs)
    return rest == 0 and count * number * groups.inputs <= filled_inputs
