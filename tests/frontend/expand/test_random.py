"""Random numbers: reproducible, and distributed as they should be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import hybridc
from hybridc.frontend.expand.generated.random import normal_numbers, uniform_numbers
from tests.support.expansion import expanded, parsed

# each of these adds its numbers to zeros
DRAWN = """g (float[300, 200] x)
=> (float[300, 200] a, float[300, 200] b, float[300, 200] c, float[300, 200] d,
    float[300, 200] e) {
    na = RandomNormal<shape = [300, 200], mean = 2.0, scale = 3.0, seed = 1.5>()
    nb = RandomNormalLike<seed = 1.5, mean = 2.0, scale = 3.0>(x)
    nc = RandomUniform<shape = [300, 200], low = -1.0, high = 3.0>()
    nd = RandomUniformLike(x)
    ne = RandomUniformLike(x)
    a = Add(x, na) b = Add(x, nb) c = Add(x, nc) d = Add(x, nd) e = Add(x, ne)
}"""
CHOSEN = """g (float[40, 500] p, double[3, 4] z, float[2, 5] logits)
=> (float[40, 500] y, int32[3, 4] none, int64[2, 4000] chosen) {
    y = Bernoulli<seed = 3.0>(p)
    none = Bernoulli<dtype = 6>(z)
    chosen = Multinomial<sample_size = 4000, dtype = 7, seed = 1.0>(logits)
}"""


def constants(model: onnx.ModelProto) -> list[np.ndarray]:
    """Those that are added, in the order of the results."""
    graph = expanded(model).graph
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    return [next(values[name] for name in node.input if name in values) for node in graph.node]


def test_numbers_have_the_mean_and_the_spread_that_is_asked_for() -> None:
    a, b, c, d, e = constants(parsed(DRAWN))
    assert np.array_equal(a, b) and not np.array_equal(d, e)
    assert abs(a.mean() - 2) < 5 * 3 / np.sqrt(a.size) and abs(a.std() - 3) < 0.05
    # shares of a normal distribution within one and two deviations
    assert abs((np.abs(a - 2) < 3).mean() - 0.6827) < 0.01
    assert abs((np.abs(a - 2) < 6).mean() - 0.9545) < 0.005
    assert c.min() >= -1 and c.max() <= 3 and abs(c.mean() - 1) < 0.02 and abs(c.var() - 4 / 3) < 0.02
    counts = np.histogram(d, 50, (0, 1))[0]
    expected = d.size / 50
    assert ((counts - expected) ** 2 / expected).sum() < 90  # chi-squared of 49: 1 of 3,000 is more
    assert abs(np.corrcoef(d.ravel(), e.ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(d.ravel()[:-1], d.ravel()[1:])[0, 1]) < 0.02


def test_numbers_are_the_same_each_time_and_others_for_another_seed() -> None:
    first, again = constants(parsed(DRAWN)), constants(parsed(DRAWN))
    assert all(np.array_equal(*each) for each in zip(first, again, strict=True))
    other = constants(parsed(DRAWN.replace("seed = 1.5", "seed = 1.25")))
    assert not np.array_equal(first[0], other[0]) and np.array_equal(first[3], other[3])


def test_numbers_are_philoxs() -> None:
    """The first ones that numpy draws with the same key."""
    numpys = np.random.Generator(np.random.Philox(key=np.array([7, 9], np.uint64)))
    assert np.array_equal(uniform_numbers((7, 9), 100), numpys.random(100))
    assert normal_numbers((7, 9), 5).shape == (5,) and np.isfinite(normal_numbers((7, 9), 100)).all()


def test_each_trip_of_a_loop_draws_others() -> None:
    model = parsed("""g (float[8] x) => (float[8] y, float[3, 8] all) {
        m = Constant<value = int64 {3}>()
        yes = Constant<value = bool {1}>()
        y, all = Loop<body = b (int64 i, bool go, float[8] s) => (bool on, float[8] t, float[8] piece) {
            on = Identity(go)
            piece = RandomNormalLike<seed = 2.0>(s)
            t = Add(s, piece)
        }>(m, yes, x)
    }""")
    graph = expanded(model).graph
    drawn = [onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer if list(tensor.dims) == [8]]
    assert len({tuple(each) for each in drawn}) == 3


@pytest.mark.parametrize("target", ["avx2", pytest.param("cuda+avx2", marks=pytest.mark.slow)])
def test_choices_have_their_probabilities(tmp_path: Path, target: str) -> None:
    has_gpu = target.startswith("cuda")
    path = tmp_path / "model.hyb"
    hybridc.compile(
        parsed(CHOSEN), path, target=target, plan_seconds=0.05, pins={"*": "gpu"} if has_gpu else {}
    )
    p = np.random.default_rng(0).uniform(size=(40, 500)).astype(np.float32)
    p[0], p[1] = 0, 1
    shares = np.array([[0.1, 0.2, 0, 0.4, 0.3], [0, 1, 0, 0, 0]])
    with np.errstate(divide="ignore"):
        feeds = {"p": p, "z": np.ones((3, 4)), "logits": np.log(shares).astype(np.float32)}
    with hybridc.load(path, emulate_gpu="64MiB" if has_gpu else None) as session:
        y, ones, chosen = session.run(None, feeds)
        assert all(
            np.array_equal(*each) for each in zip((y, ones, chosen), session.run(None, feeds), strict=True)
        )
    assert set(np.unique(y)) == {0, 1} and not y[0].any() and y[1].all() and (ones == 1).all()
    assert abs((y - p).mean()) < 0.01 and abs((y - p)[p < 0.1].mean()) < 0.02
    found = np.stack([np.bincount(row, minlength=5) for row in chosen]) / 4000
    assert np.abs(found - shares).max() < 0.03 and not found[shares == 0].any()


def test_dropout_in_training_drops_its_share_and_scales_the_rest() -> None:
    model = parsed(
        """g (float[100, 300] x) => (float[100, 300] y, bool[100, 300] mask, float[100, 300] z)
        <float ratio = {0.25}, bool on = {1}> {
            y, mask = Dropout<seed = 3>(x, ratio, on)
            z = Dropout(x, ratio, on)
        }""",
        13,
    )
    x = np.random.default_rng(0).standard_normal((100, 300)).astype(np.float32)
    session = onnxruntime.InferenceSession(expanded(model).SerializeToString())
    y, mask, z = session.run(None, {"x": x})
    assert abs(mask.mean() - 0.75) < 0.01 and abs((z != 0).mean() - 0.75) < 0.01
    assert not np.array_equal(mask, z != 0)
    np.testing.assert_allclose(y, np.where(mask, x / np.float32(0.75), 0), rtol=1e-6)


def test_dropout_in_inference_has_a_mask_of_ones() -> None:
    model = parsed("g (float[3] x) => (float[3] y, bool[3] mask) { y, mask = Dropout(x) }", 13)
    session = onnxruntime.InferenceSession(expanded(model).SerializeToString())
    y, mask = session.run(None, {"x": np.arange(3, dtype=np.float32)})
    assert mask.all() and y.tolist() == [0, 1, 2]
