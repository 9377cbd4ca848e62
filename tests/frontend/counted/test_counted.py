"""Results of which data determine how many elements there are, against onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
import tvm

import hybridc
from hybridc.errors import HybridcError, ModelError
from hybridc.frontend import read_model
from tests.support.expansion import expanded, parsed

DETECTOR = """g (float[2, 60, 4] corners, float[2, 3, 60] scores, int64[1] most, float[1] iou, float least)
=> (int64[N, 3] picked, float[N, 4] boxes, int64[N] classes, float[N, 5] rows) {
    picked = NonMaxSuppression(corners, scores, most, iou, least)
    one = Constant<value = int64[1] {1}>()
    two = Constant<value = int64[1] {2}>()
    three = Constant<value = int64[1] {3}>()
    zero = Constant<value = int64[1] {0}>()
    class_column = Slice(picked, one, two, one)
    classes = Squeeze(class_column, one)
    box_column = Slice(picked, two, three, one)
    index = Squeeze(box_column, one)
    first_image = Constant<value = int64 {0}>()
    first_boxes = Gather<axis = 0>(corners, first_image)
    boxes = Gather<axis = 0>(first_boxes, index)
    by_box = Transpose<perm = [2, 0, 1]>(scores)
    taken = Gather<axis = 0>(by_box, index)
    best = ReduceMax<axes = [1, 2], keepdims = 0>(taken)
    column = Unsqueeze(best, one)
    rows = Concat<axis = 1>(boxes, column)
}"""

# boxes by middle and size, all that there are of a class, no threshold of scores
CENTRED = """g (float[1, 40, 4] boxes, float[1, 2, 40] scores, float[1] iou) => (int64[N, 3] picked) {
    most = Constant<value = int64[1] {1000}>()
    picked = NonMaxSuppression<center_point_box = 1>(boxes, scores, most, iou)
}"""

FOLLOWING = """g (float[5, 6] x, int64[9] y, float[4, 3] z, bool[5] mask, int64[1] k)
=> (int64[2, N] where, float[N] means, float[M, 6] rows, float[K] top, int64[K] at, float[N] taken,
    float[6] largest, float mean, int64[U] values, int64[U] firsts, int64[9] inverse, int64[U] counts,
    float[V, 3] slices, float[C, 6] begin, int64[2] extents, float[E] end, float[M, 2] product) {
    zero = Constant<value = float {0}>()
    none = Constant<value = int64[1] {0}>()
    one = Constant<value = int64[1] {1}>()
    two = Constant<value = int64[1] {2}>()
    positive = Greater(x, zero)
    where = NonZero(positive)
    places = Transpose(where)
    taken = GatherND(x, places)
    rows = Compress<axis = 0>(x, mask)
    means = ReduceMean<axes = [1], keepdims = 0>(rows)
    largest = ReduceMax<axes = [0], keepdims = 0>(rows)
    mean = ReduceMean<keepdims = 0>(rows)
    number = Shape(taken)
    most = Min(k, number)
    top, at = TopK(taken, most)
    values, firsts, inverse, counts = Unique(y)
    slices = Unique<axis = 0, sorted = 0>(z)
    begin = Slice(rows, none, two, none, one)
    extents = Shape(begin)
    end = Slice(taken, one, k, none, one)
    weight = Constant<value = float[6, 2] {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}>()
    product = MatMul(rows, weight)
}"""

# what is padded is all of a tensor that is not: its copy
COPIED = """g (float[6, 8] x, bool[6] mask, int64[1] k)
=> (int64[1, N] where, float[N, 8] rows, float[8] sum, float[K, 8] first, float[8] largest, float[8] most) {
    zero = Constant<value = int64[1] {0}>()
    one = Constant<value = int64[1] {1}>()
    where = NonZero(mask)
    at = Squeeze(where, zero)
    rows = Gather<axis = 0>(x, at)
    sum = ReduceSum<keepdims = 0>(rows, zero)
    first = Slice(x, zero, k, zero, one)
    largest = ReduceMax<axes = [0], keepdims = 0>(first)
    most = ReduceMax<axes = [0], keepdims = 0>(x)
}"""


def boxes_of(seed: int) -> dict[str, np.ndarray]:
    """Feeds of DETECTOR; scores have ties, as those of quantized networks."""
    random = np.random.default_rng(seed)
    middles, sizes = random.uniform(0, 3, (2, 60, 2)), random.uniform(-1, 2, (2, 60, 2))
    return {
        "corners": np.concatenate([middles - sizes, middles + sizes], axis=2).astype(np.float32),
        "scores": (random.integers(0, 20, (2, 3, 60)) / 20).astype(np.float32),
        "most": random.integers(0, 30, 1),
        "iou": random.uniform(0.1, 0.6, 1).astype(np.float32),
        "least": np.array([0.3, 0.5, 0.9, -1.0, 2.0][seed % 5], np.float32),
    }


def centred_boxes_of(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    boxes = np.concatenate([random.uniform(0, 3, (1, 40, 2)), random.uniform(0.5, 2, (1, 40, 2))], axis=2)
    scores = random.standard_normal((1, 2, 40))
    iou = np.array([random.uniform()], np.float32)
    return {"boxes": boxes.astype(np.float32), "scores": scores.astype(np.float32), "iou": iou}


def feeds_of(seed: int) -> dict[str, np.ndarray]:
    """Feeds of FOLLOWING: of the last one no element is left."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((5, 6)).astype(np.float32)
    return {
        "x": -np.abs(x) if seed == 5 else x,
        "y": random.integers(0, 5, 9),
        "z": random.integers(0, 2, (4, 3)).astype(np.float32),
        # onnxruntime has no largest of none
        "mask": np.arange(5) == 3 if seed == 4 else np.arange(5) <= seed,
        "k": np.array([7 * seed + 1]),
    }


def copied_feeds(seed: int) -> dict[str, np.ndarray]:
    """Feeds of COPIED."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((6, 8)).astype(np.float32)
    return {"x": x, "mask": random.permutation(6) <= seed, "k": np.array([seed + 1])}


def assert_agrees(
    path: Path, text: str, feeds: Iterable[Mapping[str, np.ndarray]], target: str = "avx2"
) -> None:
    """Compiled for the target, the network gives what onnxruntime gives, in arrays of the same shapes."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model = parsed(text)
    has_gpu = target.startswith("cuda")
    hybridc.compile(model, path, target=target, plan_seconds=0.05, pins={"*": "gpu"} if has_gpu else {})
    reference = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with hybridc.load(path, emulate_gpu="64MiB" if has_gpu else None) as session:
        for fed in feeds:
            for found, wanted in zip(session.run(None, fed), reference.run(None, fed), strict=True):
                assert found.dtype == wanted.dtype and found.shape == wanted.shape
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        (DETECTOR, boxes_of),
        pytest.param(CENTRED, centred_boxes_of, marks=pytest.mark.slow),
        (FOLLOWING, feeds_of),
        (COPIED, copied_feeds),
    ],
    ids=["detector", "centred", "following", "copied"],
)
def test_results_have_as_many_elements_as_onnxruntimes(
    tmp_path: Path, text: str, drawn: Callable[[int], dict[str, np.ndarray]]
) -> None:
    assert_agrees(tmp_path / "model.hyb", text, map(drawn, range(6)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "drawn"), [(DETECTOR, boxes_of), (FOLLOWING, feeds_of)], ids=["detector", "following"]
)
def test_results_have_as_many_elements_on_a_gpu(
    tmp_path: Path, text: str, drawn: Callable[[int], dict[str, np.ndarray]]
) -> None:
    assert_agrees(tmp_path / "model.hyb", text, map(drawn, range(6)), "cuda+avx2")


@pytest.mark.parametrize(
    ("node", "operator"),
    [
        ("y = Hardmax<axis = 0>(rows)", "Hardmax"),
        ("y = Add(rows, x)", "Add"),
        ("y = Concat<axis = 0>(rows, rows)", "Concat"),
        ("y = Concat<axis = 1>(rows, x)", "Concat"),
        ("y = Reshape(rows, shape)", "Reshape"),
        ("y = Gemm<transA = 1>(rows, x)", "Gemm"),
        ("y = MatMul(w, rows)", "MatMul"),
        ("y = Gather<axis = 0>(rows, minus)", "Gather"),
        ("y = Tile(rows, twice)", "Tile"),
        ("extents = Shape(columns) y = Expand(rows, extents)", "Expand"),
        ("extents = Shape(columns) y = Reshape(rows, extents)", "Reshape"),
        ("back = Constant<value = int64[1] {-2}>() y = Slice(rows, minus, big, axis)", "Slice"),
    ],
)
def test_what_would_see_the_padding_is_refused_by_name(node: str, operator: str) -> None:
    model = parsed(f"""g (float[5, 6] x, bool[5] mask, bool[5] other) => (float[N, M] y) {{
        rows = Compress<axis = 0>(x, mask)
        columns = Compress<axis = 0>(x, other)
        axis = Constant<value = int64[1] {{0}}>()
        number = Constant<value = float {{0}}>()
        shape = Constant<value = int64[2] {{5, 6}}>()
        minus = Constant<value = int64[1] {{-1}}>()
        big = Constant<value = int64[1] {{100}}>()
        twice = Constant<value = int64[2] {{2, 1}}>()
        w = Constant<value = float[1, 5] {{1, 2, 3, 4, 5}}>()
        {node}
    }}""")
    with pytest.raises(ModelError) as refused:
        hybridc.compile(model, stop_after="canonicalize", target="avx2")
    assert refused.value.code in ("HC114", "HC117") and operator in refused.value.where


ALONG = """g (float[5, 6] x, bool[5] mask) =>
(float[N, 6] shares, float[N, 6] sums, float[N, 6] rests, int64[6] at, float[1, M] flat, float[N, 6] logs,
 float[N, 6] unit, float[6, 6] product, float[2, N, 6] both) {
    rows = Compress<axis = 0>(x, mask)
    columns = Transpose(rows)
    axis = Constant<value = int64 {0}>()
    axes = Constant<value = int64[1] {0}>()
    minus = Constant<value = int64[1] {-1}>()
    shares = Softmax<axis = 0>(rows)
    logs = LogSoftmax<axis = 0>(rows)
    sums = CumSum(rows, axis)
    rests = CumSum<exclusive = 1, reverse = 1>(rows, axis)
    at = ArgMin<axis = 0, keepdims = 0>(rows)
    unit = LpNormalization<axis = 0, p = 2>(rows)
    flat_rows = Reshape(rows, minus)
    flat = Unsqueeze(flat_rows, axes)
    product = MatMul(columns, rows)
    more = Unsqueeze(rows, axes)
    pair = Concat<axis = 0>(more, more)
    two = Constant<value = float {2}>()
    both = Mul(pair, two)
}"""


def masked_feeds(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "x": random.standard_normal((5, 6)).astype(np.float32),
        "mask": random.permutation(5) <= seed,
    }


def test_operators_along_a_padded_axis_leave_the_padding_out(tmp_path: Path) -> None:
    assert_agrees(tmp_path / "model.hyb", ALONG, map(masked_feeds, range(5)))


def test_a_condition_that_is_known_leaves_no_count() -> None:
    model = parsed("""g (float[5, 6] x) => (float[N, 6] y) {
        mask = Constant<value = int32[5] {1, 0, 0, 1, 1}>()
        condition = Cast<to = 9>(mask)
        y = Compress<axis = 0>(x, condition)
    }""")
    graph = expanded(model).graph
    assert [node.op_type for node in graph.node] == ["Gather"] and len(graph.output) == 1


def test_suppression_reads_nothing_by_what_its_workspace_held() -> None:
    """Behind the boxes that are left, a tensor that the function only writes holds anything."""
    text = """g (float[1, 40, 4] boxes, float[1, 2, 40] scores) => (int64[N, 3] picked)
    <int64[1] most = {5}, float[1] iou = {0.5}, float[1] least = {0.5}> {
        picked = NonMaxSuppression(boxes, scores, most, iou, least)
    }"""
    functions = {v.name_hint: f for v, f in read_model(parsed(text)).module.functions.items()}
    function = functions["non_max_suppression"].with_attr("global_symbol", "main")
    library = tvm.compile(tvm.IRModule({"main": function}), target="llvm")
    random = np.random.default_rng(0)
    fed = [random.uniform(size=shape).astype(np.float32) for shape in ((1, 40, 4), (1, 2, 40))]
    fed += [np.array([5]), np.full(1, 0.5, np.float32), np.full(1, 0.5, np.float32), np.array([40])]
    found = []
    for garbage in (0, 1 << 40):
        results = [tvm.runtime.tensor(np.full(shape, garbage)) for shape in ((2, 5), (2, 43))]
        library["main"](*map(tvm.runtime.tensor, fed), *results)
        found.append(results[0].numpy())
    np.testing.assert_array_equal(*found)
    assert (found[0] >= 0).any()


SCATTERED = """g (float[4, 6] x, bool[4, 6] mask, float[24] values, float[4, 6] added, bool[4] few) =>
(float[4, 6] written, float[4, 6] summed, float[4, 6] ends, float[4, 6] rows, float[4, 6] moved) {
    zero = Constant<value = int64[1] {0}>()
    one = Constant<value = int64[1] {1}>()
    minus = Constant<value = int64[1] {-1}>()
    extents = Constant<value = int64[2] {4, 6}>()
    where = NonZero(mask)
    places = Transpose(where)
    number = Shape<start = 0, end = 1>(places)
    first = Slice(values, zero, number, zero)
    written = ScatterND(x, places, first)
    chosen = GatherND(added, places)
    summed = ScatterND<reduction = "add">(x, places, chosen)
    from_end = Sub(places, extents)
    ends = ScatterND(x, from_end, first)
    few_rows = NonZero(few)
    row_places = Transpose(few_rows)
    row_values = Compress<axis = 0>(added, few)
    rows = ScatterND(x, row_places, row_values)
    column = Slice(row_places, zero, one, one)
    wide = Constant<value = int64[1, 6] {0, 0, 0, 0, 0, 0}>()
    indices = Add(column, wide)
    moved = ScatterElements<axis = 0>(x, indices, row_values)
}"""


def scattered_feeds(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    x, added = random.standard_normal((2, 4, 6)).astype(np.float32)
    values = random.standard_normal(24).astype(np.float32)
    mask, few = random.random((4, 6)) < seed / 4, random.permutation(4) < seed
    return {"x": x, "mask": mask, "values": values, "added": added, "few": few}


def test_padding_is_scattered_nowhere(tmp_path: Path) -> None:
    assert_agrees(tmp_path / "model.hyb", SCATTERED, map(scattered_feeds, range(5)))


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("scatter", ["ScatterND(x, indices, added)", "ScatterElements(x, indices, added)"])
def test_indices_outside_of_what_is_scattered_into_are_refused(scatter: str, tmp_path: Path) -> None:
    column = "indices = Transpose(moved)" if "ND" in scatter else "indices = Squeeze(moved, first)"
    text = f"""g (float[4] x, bool[5] mask, int64 more, float[5] values) => (float[4] y) {{
        first = Constant<value = int64[1] {{0}}>()
        places = NonZero(mask)
        moved = Add(places, more)
        {column}
        added = Compress<axis = 0>(values, mask)
        y = {scatter}
    }}"""
    x, values = np.zeros(4, np.float32), np.arange(1, 6, dtype=np.float32)
    hybridc.compile(parsed(text), tmp_path / "model.hyb", target="avx2")
    with hybridc.load(tmp_path / "model.hyb") as session:

        def written(place: int, more: int) -> np.ndarray:
            feeds = {"x": x, "mask": np.arange(5) == place, "more": np.array(more), "values": values}
            return session.run(None, feeds)[0]

        np.testing.assert_array_equal(written(0, -4), [1, 0, 0, 0])
        np.testing.assert_array_equal(written(3, 0), [0, 0, 0, 4])
        for place, more in [(4, 0), (0, -5), (0, -6)]:
            with pytest.raises(HybridcError) as caught:
                written(place, more)
            assert caught.value.code == "HC560"


SHAPED = """g (float[5, 6] x, bool[5] mask) =>
(float[N, 6] ones, float[N, 3, 2] parts, float[2, N, 6] both, float[N, 6] chosen, float[N] flat) {
    zero = Constant<value = int64[1] {0}>()
    one = Constant<value = int64[1] {1}>()
    minus = Constant<value = int64[1] {-1}>()
    two = Constant<value = int64[1] {2}>()
    three = Constant<value = int64[1] {3}>()
    number = Constant<value = float {1}>()
    rows = Compress<axis = 0>(x, mask)
    extents = Shape(rows)
    ones = Expand(number, extents)
    first = Constant<value = int64 {0}>()
    count = Gather<axis = 0>(extents, first)
    listed = Unsqueeze(count, zero)
    shape = Concat<axis = 0>(listed, three, two)
    parts = Reshape(rows, shape)
    wide = Concat<axis = 0>(two, extents)
    both = Expand(rows, wide)
    where = NonZero(mask)
    places = Transpose(where)
    some = GatherND(x, places)
    numbers = Cast<to = 7>(mask)
    sum = ReduceSum<keepdims = 1>(numbers, zero)
    six = Constant<value = int64[1] {6}>()
    chosen_extents = Concat<axis = 0>(sum, six)
    chosen = Expand(some, chosen_extents)
    of_rows = Slice(extents, zero, one, zero)
    firsts = ReduceMax<axes = [1], keepdims = 0>(rows)
    flat = Expand(firsts, of_rows)
}"""


def test_shapes_may_be_computed_of_counts(tmp_path: Path) -> None:
    assert_agrees(tmp_path / "model.hyb", SHAPED, map(masked_feeds, range(5)))


def test_sum_of_other_numbers_than_a_mask_is_no_count() -> None:
    text = """g (float[5] x, int64[5] numbers) => (float[N] y, int64[1, M] where) {
        zero = Constant<value = int64[1] {0}>()
        where = NonZero(numbers)
        sum = ReduceSum<keepdims = 1>(numbers, zero)
        one = Constant<value = float {1}>()
        y = Expand(one, sum)
    }"""
    with pytest.raises(ModelError):
        hybridc.compile(parsed(text), stop_after="graph", target="avx2")
