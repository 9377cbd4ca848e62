"""Heads that share keys and values, with and without those of former runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hybridc
from hybridc.errors import ModelError, UsageError
from tests.support.expansion import assert_compiles, assert_expansion_agrees, expanded, parsed


def _network(
    length: int,
    past: int,
    total: int,
    lengths: str,
    *,
    batch: int = 2,
    attributes: str = "",
    inputs: str = "",
    declared: str = "",
    packed: bool = False,
) -> str:
    """Four heads of depth 16 that share two; `lengths` is seqlens_k, constant if it is `{...}`."""
    q = 128 if packed else 64
    kv = "" if packed else f", float[{batch},{length},32] k, float[{batch},{length},32] v"
    kept = max(past, total)
    cache = f", float[{batch},2,{past},16] pk, float[{batch},2,{past},16] pv" if past else ""
    constants = f"int32[1] t = {{{total}}}"
    if lengths.startswith("{"):
        constants += f", int32[{batch}] n = {lengths}"
    else:
        declared += f", int32[{batch}] n"
    operands = (
        f"q, {'' if packed else 'k'}, {'' if packed else 'v'}, {'pk, pv' if past else ', '}, n, t{inputs}"
    )
    return (
        f"g (float[{batch},{length},{q}] q{kv}{cache}, float[16,8] c, float[16,8] s{declared})"
        f" => (float[{batch},{length},64] y, float[{batch},2,{kept},16] nk, float[{batch},2,{kept},16] nv)"
        f" <{constants}> {{ y, nk, nv = com.microsoft.GroupQueryAttention"
        f" <num_heads=4, kv_num_heads=2{attributes}> ({operands}) }}"
    )


CACHES = {
    "first": (3, 0, 3, "{2, 2}"),
    "first into room": (3, 6, 3, "{2, 2}"),
    "one more": (1, 4, 5, "{4, 4}"),
    "one more in room": (1, 8, 5, "{4, 4}"),
    "several more": (3, 4, 7, "{6, 6}"),
    "of different lengths": (1, 8, 6, "{5, 3}"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rotary", ["", ", do_rotary=1", ", do_rotary=1, rotary_interleaved=1"])
@pytest.mark.parametrize("cache", CACHES)
def test_lengths_that_are_constant(cache: str, rotary: str, packed: bool) -> None:
    inputs = ", c, s" if rotary else ""
    length, past, total, lengths = CACHES[cache]
    batch = 2
    if cache == "several more":  # onnxruntime takes them for one sequence only
        batch, lengths = 1, "{6}"
    text = _network(
        length, past, total, lengths, batch=batch, attributes=rotary, inputs=inputs, packed=packed
    )
    assert_expansion_agrees(text)


@pytest.mark.parametrize("rotary", ["", ", do_rotary=1"])
@pytest.mark.parametrize(
    ("length", "past", "total", "lengths"),
    [(3, 0, 3, [2, 2]), (1, 4, 5, [4, 4]), (1, 8, 6, [5, 3]), (1, 4, 5, [4, 2]), (3, 8, 7, [6, 6])],
)
def test_lengths_that_are_fed(length: int, past: int, total: int, lengths: list[int], rotary: str) -> None:
    inputs = ", c, s" if rotary else ""
    batch = 1 if length == 3 else 2  # onnxruntime takes several positions after others for one sequence only
    text = _network(length, past, total, "n", batch=batch, attributes=rotary, inputs=inputs)
    assert_expansion_agrees(text, feeds={"n": np.array(lengths[:batch], np.int32)})


@pytest.mark.parametrize(
    "attributes", [", softcap=2.0", ", local_window_size=3, scale=0.2", ", softcap=1.5, local_window_size=2"]
)
@pytest.mark.parametrize("bias", ["", "1,1", "2,4", "1,4"])
@pytest.mark.parametrize("cache", ["first", "one more"])
def test_windows_limits_and_biases(cache: str, bias: str, attributes: str) -> None:
    length, _, total, _ = CACHES[cache]
    declared = f", float[{bias},{length},{total}] e" if bias else ""
    text = _network(
        *CACHES[cache], attributes=attributes, inputs=", , , , e" if bias else "", declared=declared
    )
    assert_expansion_agrees(text)


@pytest.mark.parametrize("cache", ["first", "one more"])
def test_positions_that_are_given(cache: str) -> None:
    length = CACHES[cache][0]
    text = _network(
        *CACHES[cache],
        attributes=", do_rotary=1",
        inputs=", c, s, p",
        declared=f", int64[2,{length}] p",
    )
    positions = np.arange(2 * length).reshape(2, length) if length == 1 else np.tile(np.arange(4, 7), (2, 1))
    assert_expansion_agrees(text, feeds={"p": positions})


@pytest.mark.isa("avx2")
def test_shared_heads_become_one_kernel(tmp_path: Path) -> None:
    text = _network(1, 8, 6, "n", attributes=", do_rotary=1", inputs=", c, s")
    assert_compiles(text, tmp_path / "heads.hyb", feeds={"n": np.array([5, 3], np.int32)})
    planned = hybridc.plan(parsed(text), target="avx2")
    (graph,) = planned.graphs
    assert [kernel.name for kernel in graph.kernels].count("attention") == 1


def test_total_that_is_fed_is_refused_with_the_node() -> None:
    text = _network(1, 4, 5, "n").replace("int32[1] t = {5}", "").replace(" <>", "")
    text = text.replace(", int32[2] n)", ", int32[2] n, int32[1] t)")
    with pytest.raises(ModelError) as caught:
        expanded(parsed(text))
    assert caught.value.code == "HC114" and "total_sequence_length" in str(caught.value)


@pytest.mark.isa("avx2")
def test_lengths_beyond_the_cache_are_found_as_they_are_fed(tmp_path: Path) -> None:
    text = _network(1, 8, 6, "n")
    assert_compiles(text, tmp_path / "heads.hyb", feeds={"n": np.array([5, 0], np.int32)})
    with hybridc.load(tmp_path / "heads.hyb") as session:
        feeds = {port.name: np.zeros(port.shape, np.float32) for port in session.get_inputs()}
        for beyond in (6, -1):
            with pytest.raises(UsageError) as caught:
                session.run(None, feeds | {"n": np.array([5, beyond], np.int32)})
            assert caught.value.code == "HC560" and "GroupQueryAttention" in str(caught.value)
            assert str(beyond) in caught.value.what


def test_lengths_beyond_the_cache_that_are_constant_are_refused() -> None:
    with pytest.raises(ModelError, match="from 0 to 5"):
        expanded(parsed(_network(1, 8, 6, "{5, 6}")))


def test_more_new_positions_than_there_are_in_all_are_refused() -> None:
    with pytest.raises(ModelError, match="3 new positions of 2 in all"):
        expanded(parsed(_network(3, 2, 2, "n")))
