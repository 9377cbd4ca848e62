"""Gradients of padding that repeats elements, and of resizing signals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import relax, te, tirx, topi

from hybridc.passes.training.gradients import Emitter
from tests.support.gradients import assert_gradients, normal


def resized(size: int, method: str, coordinates: str, rounding: str = "") -> Callable[[te.Tensor], te.Tensor]:
    return lambda x: topi.image.resize1d(
        x,
        [0.0, 0.0],
        [size],
        layout="NCW",
        method=method,
        coordinate_transformation_mode=coordinates,
        rounding_method=rounding,
        bicubic_alpha=-0.75,
        bicubic_exclude=0,
        out_dtype="float64",
    )


MADE: dict[str, tuple[Callable[[te.Tensor], te.Tensor], tuple[int, ...]]] = {
    "mirror_pad": (lambda x: topi.nn.mirror_pad(x, [0, 1, 2], [0, 0, 3], "REFLECT"), (2, 4, 10)),
    "replicate_pad": (lambda x: topi.nn.replicate_pad(x, [0, 0, 2], [0, 0, 3]), (2, 3, 10)),
    "circular_pad": (lambda x: topi.nn.circular_pad(x, [0, 0, 2], [0, 0, 3]), (2, 3, 10)),
}
MADE |= {
    f"resize1d {method} {coordinates} {size}": (resized(size, method, coordinates, rounding), (2, 3, size))
    for method, rounding in (("nearest_neighbor", "round_prefer_floor"), ("linear", ""), ("cubic", ""))
    for coordinates in ("half_pixel", "align_corners")
    for size in (9, 3)
}


@pytest.mark.parametrize("name", MADE)
def test_elements_get_the_gradients_of_all_that_they_are_part_of(name: str) -> None:
    make, shape = MADE[name]

    def function() -> tirx.PrimFunc:
        data = te.placeholder((2, 3, 5), "float64")
        return te.create_prim_func([data, make(data)])

    def build(emitter: Emitter, x: relax.Var) -> relax.Expr:
        operator = name.split(" ")[0]
        return emitter.call((operator,), function, [x], relax.TensorType(shape, "float64"))

    assert_gradients(build, {"x": normal(0, 2, 3, 5)}, step=1.0, tolerance=1e-5)
