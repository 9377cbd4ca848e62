"""Tensors, kernels and the lookups of a graph."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from hybridc.ir import Device, Graph, Role, Tensor
from hybridc.ir.graph import OTHER_FAMILY, dtype_bits, graph_from_json, graph_to_json
from tests.support.graphs import chain, graphs


@pytest.mark.parametrize(
    ("dtype", "bits"), [("float32", 32), ("bool", 8), ("int4", 4), ("bfloat16", 16), ("uint64", 64)]
)
def test_dtype_bits(dtype: str, bits: int) -> None:
    assert dtype_bits(dtype) == bits


def test_dtype_without_a_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="object"):
        dtype_bits("object")


def test_size_rounds_part_bytes_up() -> None:
    assert Tensor("t", (3,), "int4", Role.INPUT).size_bytes == 2
    assert Tensor("t", (), "float32", Role.INPUT).size_bytes == 4
    assert Tensor("t", (0, 9), "float32", Role.INPUT).size_bytes == 0


def test_lookups_name_producers_and_consumers() -> None:
    graph = chain(2)
    assert graph.producer == {"t0": 0, "t1": 1}
    assert graph.consumers["t0"] == (1,)
    assert graph.consumers["t1"] == ()
    assert graph.kernel["k1"].inputs == ("t0", "w1")


def test_workspace_differs_by_device() -> None:
    kernel = chain(1).kernels[0]
    assert kernel.workspace_bytes(Device.GPU) == kernel.gpu_workspace_bytes


@settings(max_examples=30, deadline=None, derandomize=True)
@given(graphs())
def test_graph_survives_json(graph: Graph) -> None:
    assert graph_from_json(json.loads(json.dumps(graph_to_json(graph)))) == graph


def test_parts_survive_json_and_are_one_port() -> None:
    graph = chain(2)
    graph = replace(graph, parts=((graph.inputs[0], "other"),))
    data = graph_to_json(graph)
    assert graph_from_json(json.loads(json.dumps(data))) == graph
    assert graph.ports((*graph.inputs, "size", "other")) == ((graph.inputs[0], "other"), ("size",))
    assert "parts" not in graph_to_json(chain(2))


def test_family_survives_json_and_may_be_missing() -> None:
    graph = chain(1)
    graph = replace(graph, kernels=(replace(graph.kernels[0], family="matmul"),))
    data = graph_to_json(graph)
    assert graph_from_json(data) == graph
    del data["kernels"][0]["family"]
    assert graph_from_json(data).kernels[0].family == OTHER_FAMILY
