"""The user's wishes, spelled out for every kernel or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph
from hybridc.passes.planner.model.pins import carried_pins, resolve_pins
from tests.support.graphs import chain

GPU, CPU = Device.GPU, Device.CPU


def network() -> Graph:
    """k0 and k1 of the encoder, k1 computing two nodes; k2 for the CPU only."""
    graph = chain(3)
    origins = (("encoder/Conv_0",), ("encoder/Conv_1", "encoder/Relu_1"), ("head/Gemm_2",))
    kernels = [replace(k, origins=o) for k, o in zip(graph.kernels, origins, strict=True)]
    return replace(graph, kernels=(*kernels[:2], replace(kernels[2], devices=(CPU,))))


@pytest.mark.parametrize(
    ("pattern", "kernels"),
    [
        ("encoder/*", ["k0", "k1"]),
        ("encoder/Relu_1", ["k1"]),
        ("*Conv_?", ["k0", "k1"]),
        ("*Conv_[12]", ["k1"]),
        ("k0", ["k0"]),
        ("head/*", ["k2"]),
        ("*", ["k0", "k1", "k2"]),
    ],
)
def test_pattern_pins_every_kernel_that_computes_a_node_it_matches(pattern: str, kernels: list[str]) -> None:
    assert resolve_pins(network(), [(pattern, CPU)]) == dict.fromkeys(kernels, CPU)


def test_no_wishes_are_no_pins() -> None:
    assert resolve_pins(network(), []) == {}


def test_pins_that_agree_may_overlap() -> None:
    wishes = [("encoder/*", GPU), ("k1", GPU), ("head/*", CPU)]
    assert resolve_pins(network(), wishes) == {"k0": GPU, "k1": GPU, "k2": CPU}


def test_everything_may_be_pinned_where_there_is_nothing() -> None:
    empty = replace(network(), kernels=())
    assert resolve_pins(empty, [("*", GPU)]) == {}
    with pytest.raises(PlanError, match="matches no node"):
        resolve_pins(empty, [("k0", GPU)])


def test_case_matters() -> None:
    with pytest.raises(PlanError, match="matches no node"):
        resolve_pins(network(), [("ENCODER/*", GPU)])


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("encoder/Conv_O", "did you mean 'encoder/Conv_"), ("zzz", "`hybridc plan MODEL --all` lists")],
)
def test_pattern_that_matches_nothing_is_refused_with_a_hint(pattern: str, hint: str) -> None:
    with pytest.raises(PlanError, match=f"'{pattern}=gpu' matches no node") as refused:
        resolve_pins(network(), [(pattern, GPU)])
    assert refused.value.code == "HC205" and hint in refused.value.remedy


def test_contradiction_names_both_pins_and_the_kernel() -> None:
    with pytest.raises(PlanError) as refused:
        resolve_pins(network(), [("encoder/Conv_1", GPU), ("*/Relu_*", CPU)])
    error = refused.value
    assert error.code == "HC206"
    assert "'encoder/Conv_1=gpu'" in error.what and "'*/Relu_*=cpu'" in error.what
    assert "'k1' (encoder/Conv_1, encoder/Relu_1)" in error.where


def test_pin_to_a_device_without_code_is_refused() -> None:
    with pytest.raises(PlanError, match="no code for the gpu") as refused:
        resolve_pins(network(), [("head/*", GPU)])
    assert refused.value.code == "HC207" and "'k2' (head/Gemm_2)" in refused.value.where


def banded(*kernels: tuple[str, ...], devices: tuple[Device, ...] = (GPU, CPU)) -> Graph:
    """The network in another form: kernels that compute these nodes."""
    graph = chain(len(kernels))
    changed = (replace(k, origins=o, devices=devices) for k, o in zip(graph.kernels, kernels, strict=True))
    return replace(graph, kernels=tuple(changed))


def test_pins_are_carried_to_kernels_that_compute_the_same_nodes() -> None:
    other = banded(("encoder/Conv_0",), ("encoder/Conv_0",), ("encoder/Relu_1", "head/Gemm_2"))
    assert carried_pins(network(), {"k0": GPU}, other) == {"k0": GPU, "k1": GPU}
    assert carried_pins(network(), {"k1": CPU, "k2": CPU}, other) == {"k2": CPU}
    assert carried_pins(network(), {}, other) == {}


def test_pins_that_another_graph_cannot_meet_are_told() -> None:
    joined = banded(("encoder/Conv_0", "encoder/Conv_1"))
    assert carried_pins(network(), {"k0": GPU, "k1": CPU}, joined) is None
    assert carried_pins(network(), {"k0": GPU}, banded(("encoder/Conv_0",), devices=(CPU,))) is None
