"""Bilinear algorithms against the filters that they compute."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from hybridc.schedules.cpu.conv1d.winograd.bilinear import algorithms


@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 4)])
@pytest.mark.parametrize("taps", range(2, 12))
def test_outputs_are_those_of_the_filter(taps: int, stride: int, dilation: int) -> None:
    rng = np.random.default_rng(taps)
    for algorithm in algorithms(taps, stride, dilation):
        assert algorithm.step == algorithm.outputs * stride
        w, d = rng.standard_normal(taps), rng.standard_normal(algorithm.inputs)
        products = (np.array(algorithm.of_weights) @ w) * (np.array(algorithm.of_inputs) @ d)
        expected = [
            sum(w[k] * d[i * stride + k * dilation] for k in range(taps)) for i in range(algorithm.outputs)
        ]
        np.testing.assert_allclose(np.array(algorithm.to_outputs) @ products, expected, atol=1e-12)
        assert algorithm.products < algorithm.outputs * taps


def test_products_are_as_few_as_the_docs_say() -> None:
    assert [a.products for a in algorithms(3, 2, 1)] == [5, 9]
    assert [a.products for a in algorithms(3, 1, 1)] == [4, 6]
    assert not list(algorithms(2, 2, 1)) and not list(algorithms(3, 2, 2)) and not list(algorithms(1, 1, 1))


@pytest.mark.parametrize("taps", [2, 3, 5])
def test_every_coefficient_that_meets_an_activation_is_exact(taps: int) -> None:
    """In float32: the numbers are dyadic, and have been computed as fractions."""
    for algorithm in algorithms(taps, 1, 1):
        for value in (
            v for matrix in (algorithm.of_inputs, algorithm.to_outputs) for row in matrix for v in row
        ):
            assert float(np.float32(value)) == value
            assert Fraction(value).denominator <= 1 << 16
