"""Lowering: the functions that plans run, with their targets, and what they are called with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import tirx

from hybridc.errors import InternalError
from hybridc.ir.bind import Parameter
from hybridc.passes.lower.lower import cuda_target, llvm_target
from hybridc.targets import ISAS, parse_target
from tests.support.artifacts import (
    CPU,
    GPU,
    cpu_model,
    hybrid_model,
    model_for_two_budgets,
    relu,
    scheduled,
    streaming_model,
    transposing,
)


def test_plans_share_their_functions() -> None:
    module = model_for_two_budgets().lower().module
    assert sorted(v.name_hint for v in module.functions) == ["matmul_cpu", "matmul_gpu", "relu_cpu"]


def test_functions_carry_their_targets_and_are_in_the_module_once() -> None:
    module = hybrid_model().lower().module
    assert all(isinstance(f, tirx.PrimFunc) for f in module.functions.values())
    targets = {v.name_hint: f.attrs["target"] for v, f in module.functions.items()}
    assert {name: t.kind.name for name, t in targets.items()} == {
        "matmul_gpu": "cuda",
        "relu_cpu": "llvm",
        "add_gpu": "cuda",
        "negate_gpu": "cuda",
    }
    assert targets["matmul_gpu"].host.attrs["mcpu"] == "core-avx2"


def test_cuda_code_is_for_the_oldest_architecture() -> None:
    assert cuda_target(parse_target("cuda:sm_90,sm_75,sm_100+avx2")).attrs["arch"] == "sm_75"


@pytest.mark.parametrize("isa", ISAS)
def test_llvm_target_names_the_processor_of_the_isa(isa: str) -> None:
    attributes = llvm_target(ISAS[isa]).attrs
    assert attributes["mcpu"] == ISAS[isa].mcpu
    assert tuple(attributes.get("mattr", ())) == ISAS[isa].mattr


def test_signatures_tell_shapes_dtypes_and_how_weights_are_packed() -> None:
    lowered = cpu_model().lower()
    assert lowered.packings == (None, transposing((8, 6)))
    assert lowered.signatures["matmul", CPU] == (
        Parameter((4, 8), "float32"),
        Parameter((6, 8), "float32", layout=1),
        Parameter((4, 6), "float32"),
    )
    assert set(streaming_model().lower().signatures) == {("relu", CPU), ("matmul", GPU)}


def test_what_lanes_do_can_be_printed() -> None:
    text = str(hybrid_model().lower())
    assert "# plan 0, lane h2d\n#   copy(cpu[0] uint8[128], gpu[512] uint8[128]); record 0\n" in text
    assert "#   wait 2; relu_cpu(cpu[512] float32[4, 8], cpu[1024] float32[4, 8]); record 3" in text
    assert "def relu_cpu(" in text


def test_buffer_too_small_for_the_kernel_is_an_internal_error() -> None:
    model = hybrid_model()
    functions = {**model.functions, ("relu", CPU): scheduled(relu((33,)), CPU)}
    with pytest.raises(InternalError, match="does not fit") as caught:
        replace(model, functions=functions).lower()
    assert caught.value.code == "HC911"


def test_kernel_with_another_number_of_parameters_is_an_internal_error() -> None:
    model = cpu_model()
    first, second = model.graph.kernels
    graph = replace(model.graph, kernels=(first, replace(second, inputs=("h", "h"))))
    with pytest.raises(InternalError, match="3 tensors") as caught:
        replace(model, graph=graph).lower()
    assert caught.value.code == "HC911"
