"""Published experiments, in small: their graphs have the costs and sizes that the papers' have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridc.ir import Device

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def checkmate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from published import checkmate

    yield checkmate
    for name in [name for name in sys.modules if name.split(".")[0] == "published"]:
        del sys.modules[name]


def test_vgg19_has_the_parameters_and_multiplications_that_are_known_of_it(checkmate: Any) -> None:
    layers = checkmate.vgg19()
    assert sum(layer.parameters for layer in layers) == 143_667_240
    assert sum(layer.cost for layer in layers) == pytest.approx(19.6e9, rel=0.01)


def test_a_step_costs_three_forward_passes_and_holds_every_result_once(checkmate: Any) -> None:
    layers = checkmate.vgg19()
    graph, times_us = checkmate.training(layers, 2)
    assert sum(times_us.values()) == pytest.approx(3 * checkmate.FORWARD_US)
    made = sum(tensor.size_bytes for tensor in graph.tensors)
    assert made == 2 * 4 * (2 * sum(layer.elements for layer in layers) + 1)
    assert all(kernel.devices == (Device.GPU,) for kernel in graph.kernels)


def test_what_fits_whole_computes_nothing_again(checkmate: Any) -> None:
    layers = checkmate.vgg19()
    assert checkmate.step_us(layers, 50, 0.05) == pytest.approx(3 * checkmate.FORWARD_US)
    assert checkmate.step_us(layers, 100_000, 0.05) == float("inf")
