"""Gradients of pooling regions of interest."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import assert_gradients, distinct, gradients_of, normal

REGIONS = np.array(
    [
        [0, 0.6, 1.4, 8.2, 10.4],
        [1, 2, 4, 10.6, 7.8],
        [0, -5, -4, 3, 2],
        [0, 9, 9, 18, 17],
        [1, 3, 3, 3.2, 3.1],
        [0, 3, 3, 3, 3],
        [0, 5, 5, 2, 2],
        [1, -1e3, 0, 1e9, 4],
    ]
)
"""Some reach over the image's borders, one is smaller than an element; some are empty, one is huge."""


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("samples", [0, 2])
def test_elements_get_what_was_sampled_from_them(samples: int, aligned: bool) -> None:
    def build(emitter: Emitter, data: relax.Var) -> relax.Expr:
        return relax.op.vision.roi_align(
            data,
            relax.const(REGIONS, "float64"),
            (2, 3),
            0.5,
            sample_ratio=samples,
            aligned=aligned,
            layout="NCHW",
        )

    assert_gradients(build, {"data": normal(0, 2, 3, 6, 7)}, step=1.0)


def test_maxima_get_the_gradients_of_their_cells() -> None:
    def build(emitter: Emitter, data: relax.Var) -> relax.Expr:
        return relax.op.vision.roi_pool(data, relax.const(REGIONS, "float64"), (2, 3), 0.5, layout="NCHW")

    assert_gradients(build, {"data": distinct(0, 2, 3, 6, 7)})


def test_first_of_equal_maxima_gets_all() -> None:
    def build(emitter: Emitter, data: relax.Var) -> relax.Expr:
        whole = relax.const(np.array([[0.0, 0, 0, 2, 2]]), "float64")
        return relax.op.vision.roi_pool(data, whole, (1, 1), 1.0, layout="NCHW")

    found = gradients_of(build, {"data": np.zeros((1, 1, 3, 3))})["data"]
    assert np.flatnonzero(found).tolist() == [0]
