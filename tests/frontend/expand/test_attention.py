"""Attention of onnxruntime's own becomes products and a softmax."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hybridc
from hybridc.errors import ModelError
from tests.support.expansion import assert_compiles, assert_expansion_agrees, expanded, parsed

PROJECTED = "g (float[2,5,6] x, float[6,24] w, float[24] b, float[2,2,5,{total}] e, float[2,2,2,3,4] p"


def _mask(shape: str, total: int, seed: int = 0) -> np.ndarray:
    dims = [int(n) for n in shape.split(",")]
    random = np.random.default_rng(seed)
    if len(dims) > 1:
        return random.integers(0, 2, dims).astype(np.int32)
    ends = random.integers(2, total + 1, 2)
    return np.concatenate([ends, ends // 2])[: dims[0]].astype(np.int32)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("shape", [None, "2", "4", "2,5", "2,5,5"])
def test_projected_attention_with_masks(shape: str | None, causal: int) -> None:
    declared, used, feeds = "", "", {}
    if shape is not None:
        declared, used, feeds = f", int32[{shape}] m", ", m", {"m": _mask(shape, 5)}
    assert_expansion_agrees(
        f"{PROJECTED.format(total=5)}{declared}) => (float[2,5,8] y)"
        f" {{ y = com.microsoft.Attention <num_heads=2, unidirectional={causal}> (x, w, b{used}) }}",
        feeds=feeds,
    )


@pytest.mark.parametrize("causal", [0, 1])
def test_projected_attention_with_a_past(causal: int) -> None:
    assert_expansion_agrees(
        f"{PROJECTED.format(total=8)}, int32[2,8] m) => (float[2,5,8] y, float[2,2,2,8,4] n)"
        f" {{ y, n = com.microsoft.Attention <num_heads=2, unidirectional={causal}> (x, w, b, m, p) }}",
        feeds={"m": _mask("2,8", 8)},
    )


def test_projected_attention_with_a_scale_a_bias_of_scores_and_values_of_another_depth() -> None:
    assert_expansion_agrees(
        "g (float[2,5,6] x, float[6,28] w, float[28] b, float[1,2,5,5] e) => (float[2,5,12] y)"
        " { y = com.microsoft.Attention <num_heads=2, qkv_hidden_sizes=[8,8,12], scale=0.2> (x, w, b,,, e) }"
    )


SEPARATE = "g (float[2,3,8] q, float[2,5,8] k, float[2,5,12] v, float[28] b"


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize("opset", [11, 13, 18])
def test_heads_of_separate_tensors(bias: str, opset: int) -> None:
    text = f"{SEPARATE}) => (float[2,3,12] y)"
    assert_expansion_agrees(
        f"{text} {{ y = com.microsoft.MultiHeadAttention <num_heads=2> (q, k, v{bias}) }}", opset=opset
    )


@pytest.mark.parametrize("shape", ["2", "2,5", "2,3,5"])
def test_heads_with_masks(shape: str) -> None:
    assert_expansion_agrees(
        f"{SEPARATE}, int32[{shape}] m, float[1,1,3,5] e) => (float[2,3,12] y)"
        " { y = com.microsoft.MultiHeadAttention <num_heads=2, mask_filter_value=-50.0> (q, k, v, b, m, e) }",
        feeds={"m": _mask(shape, 5)},
    )


@pytest.mark.parametrize("causal", [0, 1])
def test_heads_with_a_past(causal: int) -> None:
    assert_expansion_agrees(
        "g (float[2,3,8] q, float[2,3,8] k, float[2,3,8] v, float[24] b, int32[2,7] m, float[2,2,4,4] pk,"
        " float[2,2,4,4] pv) => (float[2,3,8] y, float[2,2,7,4] nk, float[2,2,7,4] nv, float[2,2,3,7] qk)"
        f" {{ y, nk, nv, qk = com.microsoft.MultiHeadAttention <num_heads=2, unidirectional={causal}>"
        " (q, k, v, b, m,, pk, pv) }",
        feeds={"m": _mask("2,7", 7)},
    )


def test_keys_of_an_encoder_with_heads_apart() -> None:
    assert_expansion_agrees(
        "g (float[2,3,8] q, float[2,2,5,4] k, float[2,2,5,4] v) => (float[2,3,8] y)"
        " { y = com.microsoft.MultiHeadAttention <num_heads=2, scale=0.3> (q, k, v) }"
    )


def _ran(text: str, feeds: dict[str, np.ndarray], opset: int = 17) -> np.ndarray:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = expanded(parsed(text, opset)).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def test_packed_heads_are_the_separate_ones() -> None:
    """onnxruntime packs them for GPUs only."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 5, 2, 4), np.float32) for _ in range(3))
    bias = random.standard_normal(24, np.float32)
    flat = {n: each.reshape(2, 5, 8) for n, each in zip("qkv", (q, k, v), strict=True)}
    node = "y = com.microsoft.MultiHeadAttention <num_heads=2>"
    text = "g (float[2,5,8] q, float[2,5,8] k, float[2,5,8] v, float[24] b) => (float[2,5,8] y)"
    wanted = _ran(f"{text} {{ {node} (q, k, v, b) }}", {**flat, "b": bias})
    text = "g (float[2,5,8] q, float[2,5,2,2,4] k, float[24] b) => (float[2,5,8] y)"
    fed = {"q": flat["q"], "k": np.stack((k, v), 3), "b": bias}
    np.testing.assert_allclose(_ran(f"{text} {{ {node} (q, k, , b) }}", fed), wanted, rtol=1e-5)
    text = "g (float[2,5,2,3,4] q, float[24] b) => (float[2,5,8] y)"
    fed = {"q": np.stack((q, k, v), 3), "b": bias}
    np.testing.assert_allclose(_ran(f"{text} {{ {node} (q, , , b) }}", fed), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("node", "what"),
    [
        ("Attention <num_heads=2, do_rotary=1> (x, w, b)", "do_rotary"),
        ("Attention <num_heads=2> (x, w, b, m)", "(8,)"),
    ],
)
def test_other_uses_are_refused_with_the_node(node: str, what: str) -> None:
    text = f"{PROJECTED.format(total=5)}, int32[8] m) => (float[2,5,8] y)"
    with pytest.raises(ModelError) as caught:
        expanded(parsed(f"{text} {{ y = com.microsoft.{node} }}"))
    assert caught.value.code == "HC114" and what in str(caught.value) and "Attention_0" in str(caught.value)


@pytest.mark.isa("avx2")
def test_heads_become_one_kernel(tmp_path: Path) -> None:
    text = (
        "g (float[2,16,64] q, float[2,24,64] k, float[2,24,64] v, float[192] b, int32[2,24] m,"
        " float[1,4,16,24] e) => (float[2,16,64] y)"
        " { y = com.microsoft.MultiHeadAttention <num_heads=4> (q, k, v, b, m, e) }"
    )
    planned = hybridc.plan(parsed(text), target="avx2")
    (graph,) = planned.graphs
    assert [kernel.name for kernel in graph.kernels].count("attention") == 1
    assert_compiles(text, tmp_path / "heads.hyb", feeds={"m": _mask("2,24", 24)})


STANDARD = "float[2,{q},3,8] q, float[2,2,5,8] k, float[2,2,5,4] v"


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("heads", [2, 4, 6])
@pytest.mark.parametrize(
    "mask", ["float[3,5]", "bool[3,5]", "float[2,1,3,5]", "bool[1,1,3,5]", "float[1,3,5]"]
)
def test_standard_attention_with_masks(mask: str, heads: int, causal: int) -> None:
    shape = tuple(int(n) for n in mask.partition("[")[2].rstrip("]").split(","))
    visible = np.tri(3, 5, dtype=bool) | np.broadcast_to([[True, False, True, False, True]], shape)
    assert_expansion_agrees(
        f"g ({STANDARD.format(q=heads)}, {mask} m) => (float[2,{heads},3,4] y)"
        f" {{ y = Attention <is_causal={causal}> (q, k, v, m) }}",
        opset=23,
        feeds={"m": visible} if mask.startswith("bool") else {},
    )


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("heads", [2, 6])
def test_standard_attention_becomes_one_kernel(heads: int, tmp_path: Path) -> None:
    text = (
        f"g ({STANDARD.format(q=heads)}, float[3,5] m) => (float[2,{heads},3,4] y)"
        " { y = Attention <is_causal=1> (q, k, v, m) }"
    )
    (graph,) = hybridc.plan(parsed(text, 23), target="avx2").graphs
    assert [kernel.name for kernel in graph.kernels].count("attention") == 1
    assert_compiles(text, tmp_path / "standard.hyb", opset=23)


def test_standard_attention_of_a_query_that_sees_nothing_is_zero() -> None:
    text = f"g ({STANDARD.format(q=4)}, bool[3,5] m) => (float[2,4,3,4] y) {{ y = Attention (q, k, v, m) }}"
    mask = np.array([[True] * 5, [False] * 5, [False, True] * 2 + [True]])
    random = np.random.default_rng(0)
    shapes = {"q": (2, 4, 3, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 4)}
    fed = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    found = _ran(text, {**fed, "m": mask}, opset=23)
    assert not found[:, :, 1].any() and np.isfinite(found).all() and found[:, :, 0].all()


@pytest.mark.parametrize("seed", range(12))
def test_heads_of_random_extents(seed: int) -> None:
    random = np.random.default_rng(seed)
    batch, heads, length, others, past = (int(n) for n in random.integers(1, 7, 5))
    depth, causal = 8 * int(random.integers(1, 4)), int(random.integers(2))
    others = length if causal else others
    total = past + others
    shapes = {
        "q": (batch, length, heads * depth),
        "k": (batch, others, heads * depth),
        "v": (batch, others, heads * depth),
        "e": (1, heads, length, total),
        "pk": (batch, heads, past, depth),
        "pv": (batch, heads, past, depth),
    }
    declared = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    assert_expansion_agrees(
        f"g ({declared}, int32[{batch},{total}] m) => (float[{batch},{length},{heads * depth}] y,"
        f" float[{batch},{heads},{total},{depth}] nk, float[{batch},{heads},{total},{depth}] nv)"
        f" {{ y, nk, nv = com.microsoft.MultiHeadAttention <num_heads={heads}, unidirectional={causal}>"
        " (q, k, v,, m, e, pk, pv) }",
        feeds={"m": random.integers(0, 2, (batch, total)).astype(np.int32)},
    )


def test_causal_attention_across_sequences_of_different_lengths_is_refused() -> None:
    text = f"{SEPARATE}) => (float[2,3,12] y)"
    with pytest.raises(ModelError) as caught:
        expanded(
            parsed(
                f"{text} {{ y = com.microsoft.MultiHeadAttention <num_heads=2, unidirectional=1> (q, k, v) }}"
            )
        )
    assert caught.value.code == "HC114" and "as many new keys" in str(caught.value)
