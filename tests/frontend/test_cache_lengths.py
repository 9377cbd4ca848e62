"""Which dimensions of a decoder its context decides."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

import hybridc
from hybridc import models
from hybridc.errors import UsageError
from hybridc.frontend.inputs.cache_lengths import decoder_dimensions
from hybridc.frontend.load import load
from hybridc.sizes import Sum, sizes_of
from tests.support.decoders import appending, llama, with_open_lengths

IN_PLACES = {"past_sequence_length": 64, "total_sequence_length": 64}


EACH = sizes_of([1, 8])


@pytest.mark.parametrize(
    ("build", "given", "expected"),
    [
        (with_open_lengths, {}, {"sequence": 1, **IN_PLACES}),
        (with_open_lengths, {"sequence": 8}, IN_PLACES),
        (with_open_lengths, {"sequence": EACH}, IN_PLACES),
        (appending, {}, {"n": 1, "past": 64, "total": 65}),
        (appending, {"n": 8}, {"past": 64, "total": 72}),
        (appending, {"n": EACH}, {"past": 64, "total": Sum(("past", "n"))}),
    ],
)
def test_sizes_are_those_with_which_a_decoder_is_compiled(
    build: Any, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert decoder_dimensions(load(build())).sizes(64, 1, given) == expected


@pytest.mark.parametrize("is_packed", [False, True])
def test_columns_of_a_head_follow_from_what_attention_reads(is_packed: bool) -> None:
    """genai's files name them. Of 4 heads that share 2 of keys."""
    model = with_open_lengths()
    [node, *_] = (node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    heads = {a.name: a.i for a in node.attribute}
    (depth,) = {v.type.tensor_type.shape.dim[3].dim_value for v in model.graph.input if "past" in v.name}
    read = heads["num_heads"] + (2 * heads["kv_num_heads"] if is_packed else 0)
    del model.graph.value_info[:]
    query = onnx.helper.make_tensor_value_info(node.input[0], onnx.TensorProto.FLOAT, [1, 1, read * depth])
    model.graph.value_info.append(query)
    if is_packed != (not node.input[1]):
        node.input[1] = "" if is_packed else node.input[0]
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past", "present")):
            value.type.tensor_type.shape.dim[3].dim_param = "kv_cache_dim"
    assert decoder_dimensions(load(model)).others == {"": 1, "kv_cache_dim": depth}


@pytest.mark.parametrize("build", [llama, lambda: models.build("mlp", inputs=4, hidden=8)])
def test_other_networks_are_refused(build: Any) -> None:
    with pytest.raises(UsageError) as caught:
        decoder_dimensions(load(build()))
    assert caught.value.code == "HC539" and caught.value.remedy


@pytest.mark.parametrize(("build", "name"), [(with_open_lengths, "sequence"), (appending, "n")])
def test_a_context_is_all_that_a_decoder_needs(build: Any, name: str) -> None:
    planned = hybridc.plan(build(), target="avx2", context=64)
    assert [str(bucket.sizes[name]) for bucket in planned.buckets] == ["1", "32"]
    shapes = {tensor.name: tensor.shape for tensor in planned.graphs[-1].tensors}
    assert shapes["past_key_values_0_key"][2] == 64


@pytest.mark.parametrize("context", [0, -1, "4", True])
def test_invalid_contexts(context: Any) -> None:
    with pytest.raises(UsageError) as caught:
        hybridc.plan(with_open_lengths(), target="avx2", context=context)
    assert caught.value.code == "HC512"
