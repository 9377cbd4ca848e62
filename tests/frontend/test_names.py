"""ONNX names become distinct identifiers; the user's names stay at the interface."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from onnx.helper import make_node

from hybridc.frontend.names import MAX_NAME_LENGTH, safe_names, unique_names


def test_a_safe_name_keeps_itself_whatever_comes_first():
    assert safe_names(["a/b", "a:b", "a_b"]) == {"a/b": "a_b_1", "a:b": "a_b_2", "a_b": "a_b"}


def test_words_of_c_and_cuda_are_avoided():
    for word in ("for", "float", "__global__", "threadIdx", "template", "half", "main", "_Complex", "in"):
        assert safe_names([word])[word] != word


@given(st.lists(st.text(max_size=90)))
def test_names_are_distinct_bounded_identifiers(names):
    chosen = safe_names(names, taken=["a", "v_"])
    assert set(chosen) == set(names)
    assert len(set(chosen.values()) | {"a", "v_"}) == len(chosen) + 2
    for identifier in chosen.values():
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", identifier)
        assert len(identifier) <= MAX_NAME_LENGTH


@given(st.lists(st.sampled_from(["a", "a_1", "a_2", "b"])))
def test_repeated_names_are_told_apart_and_first_ones_kept(names):
    unique = unique_names(names)
    assert len(set(unique)) == len(names)
    assert all(unique[names.index(name)] == name for name in names)


def test_odd_names_survive_at_the_interface(make_model, assert_matches, rng):
    nodes = [
        make_node("Add", ["a/b", "a:b"], ["for"], name="naïve/+"),
        make_node("Mul", ["for", "层.weight"], ["0 out"], name="a::b"),
    ]
    weights = {"层.weight": rng.standard_normal(4, dtype=np.float32)}
    model = make_model(nodes, {"a/b": [4], "a:b": [4]}, ["0 out", "for"], weights)
    feeds = {name: rng.standard_normal(4, dtype=np.float32) for name in ("a/b", "a:b")}
    imported = assert_matches(model, feeds)
    assert [value.name for value in imported.inputs] == ["a/b", "a:b"]
    assert [value.name for value in imported.outputs] == ["0 out", "for"]
    assert set(imported.origins.values()) == {("naïve/+",), ("a::b",)}
    for name in (*imported.origins, *imported.weights, *(v.variable for v in imported.inputs)):
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
