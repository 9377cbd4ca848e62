from __future__ import annotations

import numpy as np
import pytest

from hybridc.passes.layout.channel_groups import Groups, joining
from hybridc.targets import ISAS


def groups_of(count: int, inputs: int, outputs: int) -> Groups:
    shape = (count * outputs, inputs, 1, 1)
    return Groups(np.random.default_rng(8).standard_normal(shape).astype("f4"), count)


def test_joined_groups_compute_the_same():
    groups = groups_of(6, 3, 2)
    x = np.random.default_rng(9).standard_normal(18)

    def applied(some: Groups) -> np.ndarray:
        weight = some.weight.reshape(some.count, some.outputs, some.inputs)
        return np.einsum("goi,gi->go", weight, x.reshape(some.count, some.inputs)).reshape(-1)

    for number in (1, 2, 3, 6):
        joined = groups.joined(number)
        assert (joined.count, joined.inputs, joined.outputs) == (6 // number, 3 * number, 2 * number)
        np.testing.assert_allclose(applied(joined), applied(groups))


def test_filled_outputs_are_zero():
    filled = groups_of(10, 4, 4).filled(16)
    assert filled.shape == (48, 4, 1, 1)
    assert not filled[40:].any()


@pytest.mark.parametrize(
    ("groups", "input_lanes", "expected"),
    [
        ((32, 4, 4), 16, (1, 16, 1)),
        ((10, 4, 4), 8, (1, 8, 2)),
        ((3, 24, 24), 16, (1, 8, 4 / 3)),
        ((4, 56, 56), 16, (1, 16, 8 / 7)),
        ((4, 12, 12), 16, (1, 16, 8 / 3)),
        ((8, 6, 6), 16, (2, 16, 16 / 3)),
        ((3, 80, 18), 16, (3, 16, 3)),
        ((8, 3, 3), 8, (8, 8, 8)),
    ],
    ids=str,
)
def test_groups_are_joined_so_that_vectors_are_filled_best(groups, input_lanes, expected):
    assert joining(groups_of(*groups), input_lanes, ISAS["avx512"]) == pytest.approx(expected)


def test_groups_that_fill_last_blocks_read_channels_that_exist():
    """Ten groups of four outputs in blocks of 16 are twelve, but blocks of eight hold inputs for ten."""
    assert joining(groups_of(10, 4, 4), 16, ISAS["avx512"])[:2] == (1, 16)
    assert joining(groups_of(10, 4, 4), 8, ISAS["avx512"])[:2] == (1, 8)
