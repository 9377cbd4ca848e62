"""Operators for GPUs, which onnxruntime does not run on the CPU: held against their definitions in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hybridc.errors import ModelError
from tests.support.expansion import expanded, parsed

onnxruntime = pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")
RANDOM = np.random.default_rng(13)


def run(text: str, **feeds: np.ndarray) -> list[np.ndarray]:
    """By onnxruntime, of standard operators."""
    network = expanded(parsed(text)).SerializeToString()
    return onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"]).run(None, feeds)


def drawn(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype("f4")


def group_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, groups: int) -> np.ndarray:
    """Of [N, H, W, C]."""
    parted = x.astype("f8").reshape(x.shape[0], -1, groups, x.shape[3] // groups)
    mean, variance = (f(parted, axis=(1, 3), keepdims=True) for f in (np.mean, np.var))
    return ((parted - mean) / np.sqrt(variance + 1e-3)).reshape(x.shape) * scale + bias


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("is_last", [0, 1])
@pytest.mark.parametrize("activation", [0, 1])
def test_groups_are_normalised(dtype: str, is_last: int, activation: int) -> None:
    x, scale, bias = drawn(2, 5, 3, 6).astype("f2" if dtype == "float16" else "f4"), drawn(6), drawn(6)
    shape = "2,5,3,6" if is_last else "2,6,5,3"
    (found,) = run(
        f"g ({dtype}[{shape}] x, float[6] s, float[6] b) => ({dtype}[{shape}] y)"
        f" {{ y = com.microsoft.GroupNorm <groups=3, epsilon=0.001,"
        f" activation={activation}, channels_last={is_last}> (x, s, b) }}",
        x=x if is_last else np.ascontiguousarray(x.transpose(0, 3, 1, 2)),
        s=scale,
        b=bias,
    )
    wanted = group_norm(x, scale, bias, 3)
    wanted = wanted / (1 + np.exp(-wanted)) if activation else wanted
    found = found if is_last else found.transpose(0, 2, 3, 1)
    np.testing.assert_allclose(found, wanted, atol=4e-3 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize(("skip", "rest"), [("2,5,3,6", ""), ("2,1,1,6", ", c"), ("2,6", ", c")])
def test_groups_of_a_sum_are_normalised(skip: str, rest: str) -> None:
    x, scale, bias, other = drawn(2, 5, 3, 6), drawn(6), drawn(6), drawn(6)
    skipped = drawn(*(int(n) for n in skip.split(",")))
    found, total = run(
        f"g (float[2,5,3,6] x, float[6] s, float[6] b, float[{skip}] k, float[6] c)"
        " => (float[2,5,3,6] y, float[2,5,3,6] t)"
        f" {{ y, t = com.microsoft.SkipGroupNorm <groups=2, epsilon=0.001> (x, s, b, k{rest}) }}",
        x=x,
        s=scale,
        b=bias,
        k=skipped,
        c=other,
    )
    wanted = x + (skipped if skipped.ndim == 4 else skipped[:, None, None]) + (other if rest else 0)
    np.testing.assert_allclose(total, wanted, atol=1e-5)
    np.testing.assert_allclose(found, group_norm(wanted, scale, bias, 2), atol=1e-5)


def test_convolution_with_channels_last() -> None:
    x, w, b = drawn(2, 7, 8, 4), drawn(6, 3, 3, 2), drawn(6)
    (found,) = run(
        "g (float[2,7,8,4] x, float[6,3,3,2] w, float[6] b) => (float[2,4,4,6] y)"
        " { y = com.microsoft.NhwcConv <group=2, pads=[1,1,1,1], strides=[2,2]> (x, w, b) }",
        x=x,
        w=w,
        b=b,
    )
    sides = [torch.from_numpy(t.transpose(0, 3, 1, 2).copy()) for t in (x, w)]
    wanted = torch.conv2d(*sides, torch.from_numpy(b), stride=2, padding=1, groups=2)
    np.testing.assert_allclose(found, wanted.numpy().transpose(0, 2, 3, 1), atol=1e-5)


def test_halves_and_sums() -> None:
    x, b, k = drawn(2, 5, 8), drawn(8), drawn(2, 5, 8)
    split, total = run(
        "g (float[2,5,8] x, float[8] b, float[2,5,8] k) => (float[2,5,4] y, float[2,5,8] z)"
        " { y = com.microsoft.BiasSplitGelu (x, b) z = com.microsoft.BiasAdd (x, b, k) }",
        x=x,
        b=b,
        k=k,
    )
    first, gate = np.split((x + b).astype("f8"), 2, axis=2)
    error = np.vectorize(math.erf)(gate / math.sqrt(2))
    np.testing.assert_allclose(split, first * gate / 2 * (1 + error), atol=1e-5)
    np.testing.assert_allclose(total, x + b + k, atol=1e-6)


def test_groups_that_do_not_divide_the_channels_are_refused() -> None:
    text = (
        "g (float[2,5,3,6] x, float[6] s, float[6] b) => (float[2,5,3,6] y)"
        " { y = com.microsoft.GroupNorm <groups=4, activation=0> (x, s, b) }"
    )
    with pytest.raises(ModelError) as caught:
        expanded(parsed(text))
    assert caught.value.code == "HC114" and "of 4 groups" in str(caught.value)
