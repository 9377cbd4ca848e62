"""All refusals of a model at once are those that it would be refused with one after the other."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest

from hybridc.errors import ModelError
from hybridc.frontend import codes, find_refusals, read_model

NGRAMS = (
    'mode="TF", min_gram_length=1, max_gram_length=1, max_skip_count=0, ngram_counts=[0],'
    " ngram_indexes=[0, 1], pool_int64s=[2, 3]"
)
"""Attributes of TfIdfVectorizer, which hybridc has not."""
HEAD = '<ir_version: 10, opset_import: ["" : 20, "my" : 1, "com.microsoft" : 1]>\n'


def refused(text: str) -> list[tuple[str, str]]:
    """Code and place of each refusal; the first one that `read_model` meets is among them."""
    model = onnx.parser.parse_model(HEAD + text)
    found = find_refusals(model)
    if not found:
        read_model(model)
    else:
        with pytest.raises(ModelError) as first:
            read_model(model)
        assert any(error.code == first.value.code for error in found)
    assert all(error.where and error.remedy for error in found)
    return [(error.code, error.where.removeprefix("<ModelProto>: ")) for error in found]


def test_a_model_that_is_taken_has_none() -> None:
    assert refused("g (float[2, 3] x) => (float[2, 3] y) { y = Relu(x) }") == []


def test_nodes_behind_a_refused_one_are_looked_at_with_inferred_shapes() -> None:
    text = """g (float[2, 2, 8, 8] x) => (float[1, 1, 1, 1] y, float[2, 2, 8, 8] u)
    <float[1, 4] rois = {0, 0, 1, 1}, int64[1] far = {2}, int64[1, 1, 1, 1] further = {8}> {
        activated = Relu(x)
        cut = RoiAlign <output_height = 2, output_width = 2>(activated, rois, far)
        taken = GatherElements <axis = 2>(activated, further)
        numbers = Cast <to = 7>(x)
        flat = Reshape <allowzero = 0>(numbers, shape)
        counts = TfIdfVectorizer <NGRAMS>(flat)
        wide = Cast <to = 7>(counts)
        again = TfIdfVectorizer <NGRAMS>(wide)
        total = ReduceSum(cut)
        y = Add(taken, total)
        few = ReduceSum(again)
        u = Add(x, few)
    }""".replace("NGRAMS", NGRAMS).replace("<float[1", "<int64[1] shape = {-1}, float[1")
    assert refused(text) == [
        (codes.MISSING_OPERATOR, "TfIdfVectorizer: 'TfIdfVectorizer_5'"),
        (codes.MISSING_OPERATOR, "TfIdfVectorizer: 'TfIdfVectorizer_7'"),
        (codes.WRONG_RESULT, "node 'RoiAlign_1' (RoiAlign)"),
        (codes.WRONG_RESULT, "node 'GatherElements_2' (GatherElements)"),
    ]


def test_nothing_is_said_of_nodes_whose_operands_are_unknown() -> None:
    text = """g (float[2, 3] x, float s) => (float[n] y, float[1, 1] z)
    <int64[1, 1] far = {2}> {
        odd = my.Odd(x)
        y = Range(odd, s, s)
        z = GatherElements(x, far)
    }"""
    assert refused(text) == [
        (codes.UNKNOWN_DOMAIN, "node 'Odd_0'"),
        (codes.WRONG_RESULT, "node 'GatherElements_2' (GatherElements)"),
    ]


def test_uses_that_cannot_be_expanded_are_told_once_each() -> None:
    text = """g (float[2, 4] x, float[4, 3] w) => (float[2, 3] y, float[2, 3] z) {
        odd = com.microsoft.FusedGemm <activation = "Odd">(x, w)
        y = Relu(odd)
        z = com.microsoft.FusedGemm <activation = "Other">(x, w)
    }"""
    assert refused(text) == [
        (codes.WRONG_RESULT, "node 'FusedGemm_0' (FusedGemm)"),
        (codes.WRONG_RESULT, "node 'FusedGemm_2' (FusedGemm)"),
    ]


def test_all_inputs_of_unknown_shape_are_told() -> None:
    text = "g (float[n, 3] x, float[m, 3] z) => (float[k, 3] y) { y = my.Odd(x, z) }"
    assert refused(text) == [
        (codes.UNKNOWN_DOMAIN, "node 'Odd_0'"),
        (codes.UNKNOWN_DIMENSION, "input 'x'"),
        (codes.UNKNOWN_DIMENSION, "input 'z'"),
    ]


def test_sizes_that_are_given_are_used() -> None:
    model = onnx.parser.parse_model(HEAD + "g (float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }")
    assert [error.code for error in find_refusals(model)] == [codes.UNKNOWN_DIMENSION]
    assert find_refusals(model, dims={"n": 2}) == find_refusals(model, shapes={"x": (2, 3)}) == ()


def test_bytes_that_are_no_model_are_the_only_refusal() -> None:
    assert [error.code for error in find_refusals(b"no model")] == [codes.NOT_ONNX]


def test_every_shape_that_depends_on_data_is_told() -> None:
    text = """g (float[2, 3] x, float[4] z) => (float[a, b] y, float[c, d] u) {
        places = NonZero(x)
        extents = Shape(places)
        zeros = ConstantOfShape(extents)
        y = Relu(zeros)
        others = NonZero(z)
        sizes = Shape(others)
        more = ConstantOfShape(sizes)
        u = Exp(more)
    }"""
    assert refused(text) == [
        (codes.DATA_DEPENDENT_SHAPE, "node 'ConstantOfShape_2'"),
        (codes.DATA_DEPENDENT_SHAPE, "node 'ConstantOfShape_6'"),
    ]
