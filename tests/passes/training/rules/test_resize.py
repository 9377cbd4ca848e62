"""Gradients of resizing."""

from __future__ import annotations

import itertools

import pytest
from tvm import relax

from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import assert_gradients, normal, side_by_side

resize2d = relax.op.image.resize2d
METHODS = {
    "nearest_neighbor": ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"],
    "linear": [""],
    "cubic": [""],
}


COORDINATES = [
    "half_pixel",
    "align_corners",
    pytest.param("asymmetric", marks=pytest.mark.slow),
    pytest.param("pytorch_half_pixel", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("coordinates", COORDINATES)
def test_sources_gather_what_was_interpolated_from_them(coordinates: str) -> None:
    """Pixels are float32 in the forward pass of every dtype."""
    kinds = [
        (method, rounding, size)
        for (method, roundings), size in itertools.product(METHODS.items(), [(8, 10), (7, 12), (2, 5)])
        for rounding in roundings
    ]

    def build(emitter: Emitter, **inputs: relax.Var) -> relax.Expr:
        results = [
            resize2d(
                x,
                size,
                layout="NCHW",
                method=method,
                coordinate_transformation_mode=coordinates,
                rounding_method=rounding,
            )
            for x, (method, rounding, size) in zip(inputs.values(), kinds, strict=True)
        ]
        return side_by_side(results, emitter)

    values = {f"x{i}": normal(i, 1, 2, 4, 5) for i in range(len(kinds))}
    assert_gradients(build, values, step=1.0, tolerance=1e-5)


def test_cubic_weights_may_leave_out_what_lies_outside() -> None:
    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        return resize2d(x, (9, 7), layout="NCHW", method="cubic", cubic_exclude=1, cubic_alpha=-0.5)

    assert_gradients(build, {"x": normal(0, 1, 1, 4, 5)}, step=1.0, tolerance=1e-5)


def test_volumes() -> None:
    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        return relax.op.image.resize3d(x, (4, 6, 5), layout="NCDHW", method="linear")

    assert_gradients(build, {"x": normal(0, 1, 2, 2, 3, 4)}, step=1.0, tolerance=1e-5)
