from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from hybridc.passes.fuse.attention import Attention, TransposedOperand, attention_function
from hybridc.schedules.cpu.attention.attention import attention
from hybridc.schedules.cpu.attention.few_queries import MOST_QUERIES, few_queries
from hybridc.schedules.quantized_rows import wide_rows, with_rows
from hybridc.schedules.storage import stored
from tests.support.integer_rows import numbers_of, rows_of


def function(
    batch: int,
    rows: int,
    columns: int,
    heads: int,
    depth: int,
    *,
    masked: bool,
    mask_rows: int = 1,
    chooses: bool = False,
) -> tirx.PrimFunc:
    """Attention of `[batch, position, heads, depth]` tensors with scores / 8, and a mask over the keys, which
    is added or chooses between them and minus infinity."""

    def tensor(name: str, *shape: int) -> relax.Var:
        return relax.Var(name, relax.TensorType(shape, "float32"))

    scores = tensor("scores", batch, heads, rows, columns)
    scaled = tensor("scaled", batch, heads, rows, columns)
    steps = [relax.op.divide(scores, relax.const(8.0, "float32"))]
    if chooses:
        seen = relax.Var("mask", relax.TensorType((batch, 1, mask_rows, columns), "bool"))
        steps.append(relax.op.where(seen, scaled, relax.const(-np.inf, "float32")))
    elif masked:
        steps.append(relax.op.add(scaled, tensor("mask", batch, 1, mask_rows, columns)))
    match = Attention(
        query=TransposedOperand(tensor("q", batch, rows, heads, depth), (0, 2, 1, 3)),
        key=TransposedOperand(tensor("k", batch, columns, heads, depth), (0, 2, 3, 1)),
        value=TransposedOperand(tensor("v", batch, columns, heads, depth), (0, 2, 1, 3)),
        steps=tuple(steps),
        scores=scores,
        result_axes=(0, 2, 1, 3),
        members=(scores, scaled),
    )
    return attention_function(match)


@pytest.mark.parametrize(
    ("batch", "rows", "columns", "heads", "depth", "masked"),
    [
        (1, 13, 21, 2, 32, True),
        (2, 8, 64, 3, 16, False),
        (1, 197, 197, 1, 64, False),
        (1, 1, 5, 2, 16, True),
        (1, 50, 700, 2, 80, False),
        (2, 45, 555, 1, 48, True),
        # vectors of the values that stick out
        (1, 33, 40, 2, 40, False),
        (2, 5, 70, 1, 27, True),
        # few queries, whose keys stay where they are
        (1, 3, 700, 2, 64, True),
        (2, 1, 33, 3, 80, False),
        (1, 8, 129, 1, 128, True),
        (1, 6, 150, 2, 64, True),
    ],
)
def test_attention_equals_float64(harness, batch, rows, columns, heads, depth, masked):
    made = function(batch, rows, columns, heads, depth, masked=masked)
    scheduled = harness.schedule(made)
    packs_keys = rows > MOST_QUERIES or depth % 16 > 0
    assert scheduled.rule == (attention if packs_keys else few_queries).__name__
    rng = np.random.default_rng(rows)
    q, k, v = (
        rng.standard_normal((batch, n, heads, depth)).astype(np.float32) for n in (rows, columns, columns)
    )
    mask = np.where(rng.random((batch, 1, 1, columns)) < 0.3, -np.inf, 0).astype(np.float32)
    mask[..., 0] = 0
    inputs = [q, k, v, mask] if masked else [q, k, v]
    (result,) = harness.run(made, scheduled, inputs)
    wide = [x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v)]
    logits = wide[0] @ wide[1].transpose(0, 1, 3, 2) / 8 + (mask if masked else 0)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ wide[2]
    assert np.abs(result - expected.transpose(0, 2, 1, 3)).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize(("rows", "rule"), [(20, attention), (4, few_queries), (1, few_queries)])
def test_keys_and_values_of_16_bits_are_read_where_they_are(harness, rows, rule):
    """As a decoder may store them: queries and result are float32, and nothing is copied that was not."""
    wide = function(1, rows, 150, 2, 64, masked=True)
    made = stored(wide, {1: "float16", 2: "float16"})
    scheduled = harness.schedule(made)
    assert scheduled.rule == rule.__name__
    assert scheduled.workspace_bytes == harness.schedule(wide).workspace_bytes
    rng = np.random.default_rng(rows)
    q, k, v = (
        rng.standard_normal((1, n, 2, 64)).astype(dtype)
        for n, dtype in ((rows, "float32"), (150, "float16"), (150, "float16"))
    )
    mask = np.where(np.arange(150) < 130, 0, -np.inf).astype(np.float32).reshape(1, 1, 1, 150)
    (result,) = harness.run(made, scheduled, [q, k, v, mask])
    q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v))
    logits = q @ k.transpose(0, 1, 3, 2) / 8 + mask
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    expected = (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3)
    assert np.abs(result - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("rows", "depth", "rule"),
    [(20, 64, attention), (20, 27, attention), (4, 64, few_queries), (1, 64, few_queries)],
)
def test_keys_and_values_of_integers_are_read_where_they_are(harness, rows, depth, rule):
    """In rows with a scale each."""
    wide = function(1, rows, 150, 2, depth, masked=True)
    made = with_rows(wide, (1, 2))
    back = wide_rows(made)
    assert back is not None and back.positions == (1, 2)
    tvm.ir.assert_structural_equal(back.function, wide)
    scheduled = harness.schedule(made)
    assert scheduled.rule == rule.__name__
    assert scheduled.workspace_bytes == harness.schedule(wide).workspace_bytes
    rng = np.random.default_rng(rows)
    q, k, v = (rng.standard_normal((1, n, 2, depth)).astype(np.float32) for n in (rows, 150, 150))
    k, v = rows_of(k), rows_of(v)
    mask = np.where(np.arange(150) < 130, 0, -np.inf).astype(np.float32).reshape(1, 1, 1, 150)
    (result,) = harness.run(made, scheduled, [q, k, v, mask])
    wide_q, wide_k, wide_v = (
        x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, numbers_of(k), numbers_of(v))
    )
    logits = wide_q @ wide_k.transpose(0, 1, 3, 2) / 8 + mask
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    expected = (weights / weights.sum(-1, keepdims=True) @ wide_v).transpose(0, 2, 1, 3)
    assert np.abs(result - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("rows", [45, 3])
def test_heads_of_one_tensor(harness, rows):
    """Queries, keys and values are neighbouring heads."""
    heads, depth = 2, 48
    tensor = relax.Var("heads", relax.TensorType((2, rows, 3 * heads, depth), "float32"))
    scores = relax.Var("scores", relax.TensorType((2, heads, rows, rows), "float32"))
    query, key, value = (
        TransposedOperand(tensor, axes, part=(2, first, first + heads))
        for axes, first in (((0, 2, 1, 3), 0), ((0, 2, 3, 1), heads), ((0, 2, 1, 3), 2 * heads))
    )
    made = attention_function(Attention(query, key, value, (), scores, (0, 2, 1, 3), (scores,)))
    data = np.random.default_rng(rows).standard_normal((2, rows, 3 * heads, depth)).astype(np.float32)
    (result,) = harness.run(made, harness.schedule(made), [data] * 3)
    q, k, v = np.split(data.astype(np.float64).transpose(0, 2, 1, 3), 3, axis=1)
    weights = np.exp(q @ k.transpose(0, 1, 3, 2))
    expected = (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3)
    assert np.abs(result - expected).max() <= 4e-6 * np.abs(expected).max()


@pytest.mark.parametrize("rows", [40, 5])
@pytest.mark.parametrize("mask", ["far", "all"])
def test_rows_whose_first_keys_are_masked(harness, mask, rows):
    """The first chunk of keys has no weight, or (`all`) none has: not a number, as 0 / 0 is."""
    made = function(1, rows, 600, 1, 32, masked=True)
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, n, 1, 32)).astype(np.float32) for n in (rows, 600, 600))
    hidden = np.full((1, 1, 1, 600), -np.inf, np.float32)
    if mask == "far":
        hidden[..., 580:] = -1e9  # a number like those that exporters write for minus infinity
    (result,) = harness.run(made, harness.schedule(made), [q, k, v, hidden])
    if mask == "all":
        assert np.isnan(result).all()
        return
    # scores of 1e9 have no digits left for their differences: what is visible weighs the same
    expected = v[0, 580:, 0].astype(np.float64).mean(0)
    assert np.abs(result - expected[None, None, None]).max() <= 1e-5


@pytest.mark.parametrize("rows", [33, 4])
def test_scores_of_great_range_equal_float64(harness, rows):
    """The greatest score comes late, so that all before it is scaled down to nothing."""
    made = function(1, rows, 500, 1, 16, masked=False)
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, n, 1, 16)).astype(np.float32) for n in (rows, 500, 500))
    k *= np.linspace(0.1, 100, 500, dtype=np.float32)[None, :, None, None]
    (result,) = harness.run(made, harness.schedule(made), [q, k, v])
    wide = [x.astype(np.float64)[0, :, 0] for x in (q, k, v)]
    logits = wide[0] @ wide[1].T / 8
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ wide[2]
    assert np.abs(result[0, :, 0] - expected).max() <= 1e-4 * np.abs(expected).max()


LEAST = np.finfo(np.float32).min


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("columns", [64, 300, 1000])
@pytest.mark.parametrize("hidden", [LEAST, -np.inf])
def test_keys_behind_the_last_one_that_is_seen_are_not_read(harness, rows, columns, hidden):
    """Drawn numbers of keys are seen, of each of two batches another; those behind their vectors are NaN."""
    made = function(2, rows, columns, 2, 32, masked=True)
    scheduled = harness.schedule(made)
    assert scheduled.rule == few_queries.__name__
    rng, lanes = np.random.default_rng([rows, columns]), harness.isa.lanes()
    for _ in range(3):
        seen = rng.integers(1, columns, 2)
        q, k, v = (rng.standard_normal((2, n, 2, 32)).astype(np.float32) for n in (rows, columns, columns))
        mask = np.where(np.arange(columns) < seen[:, None], 0, hidden).astype(np.float32)
        for batch, count in enumerate(seen):
            mask[batch, rng.integers(0, count, count // 4)] = hidden
            mask[batch, count - 1] = 0
            behind = -(-count // lanes) * lanes
            k[batch, behind:], v[batch, behind:] = np.nan, np.nan
        (result,) = harness.run(made, scheduled, [q, k, v, mask[:, None, None]])
        for batch, count in enumerate(seen):
            wide = [x[batch].astype(np.float64).transpose(1, 0, 2) for x in (q, k[:, :count], v[:, :count])]
            logits = wide[0] @ wide[1].transpose(0, 2, 1) / 8 + mask[batch, :count]
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            expected = (weights / weights.sum(-1, keepdims=True) @ wide[2]).transpose(1, 0, 2)
            assert np.abs(result[batch] - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("columns", [64, 300])
def test_keys_that_a_mask_chooses_a_number_for_are_not_read(harness, rows, columns):
    """Zeros of a mask hide keys, in each of two batches those behind a drawn one, which are NaN. A chunk of
    values may go further."""
    made = function(2, rows, columns, 2, 32, masked=True, chooses=True)
    scheduled = harness.schedule(made)
    rng, reach = np.random.default_rng([rows, columns]), 6 * harness.isa.lanes()
    q, k, v = (rng.standard_normal((2, n, 2, 32)).astype(np.float32) for n in (rows, columns, columns))
    seen = rng.integers(1, columns, 2)
    mask = (np.arange(columns) < seen[:, None]).astype(np.float32)
    for batch, count in enumerate(seen):
        k[batch, -(-count // reach) * reach :] = np.nan
    (result,) = harness.run(made, scheduled, [q, k, v, mask[:, None, None]])
    for batch, count in enumerate(seen):
        wide = [x[batch].astype(np.float64).transpose(1, 0, 2) for x in (q, k[:, :count], v[:, :count])]
        logits = wide[0] @ wide[1].transpose(0, 2, 1) / 8
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        expected = (weights / weights.sum(-1, keepdims=True) @ wide[2]).transpose(1, 0, 2)
        assert np.abs(result[batch] - expected).max() <= 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize(("rows", "columns"), [(40, 300), (300, 300), (301, 1000)])
@pytest.mark.parametrize("hidden", [LEAST, -np.inf])
def test_keys_behind_those_of_a_block_of_queries_are_left_out(harness, rows, columns, hidden):
    """Each query sees a key more than the one before; of two batches the first one has a longer past. Queries
    whose block and last panel end in front of the first NaN do not see it."""
    made = function(2, rows, columns, 2, 32, masked=True, mask_rows=rows)
    scheduled = harness.schedule(made)
    assert scheduled.rule == attention.__name__
    rng = np.random.default_rng([rows, columns])
    q, k, v = (rng.standard_normal((2, n, 2, 32)).astype(np.float32) for n in (rows, columns, columns))
    pasts = np.array([columns - rows, (columns - rows) // 2])
    counts = pasts[:, None] + 1 + np.arange(rows)
    mask = np.where(np.arange(columns) < counts[..., None], 0, hidden).astype(np.float32)
    first_nan = pasts[1] + rows * 3 // 4
    k[1, first_nan:], v[1, first_nan:] = np.nan, np.nan
    (result,) = harness.run(made, scheduled, [q, k, v, mask[:, None]])
    # 24 queries at most are a block, and six vectors of keys a panel
    reach = 24 + 6 * harness.isa.lanes()
    untouched = max(first_nan - reach - pasts[1], 0)
    assert untouched or rows < 200
    for batch, whole in enumerate((rows, untouched)):
        wide = [x[batch].astype(np.float64).transpose(1, 0, 2) for x in (q, k, v)]
        expected = np.empty((whole, 2, 32))
        for row, seen in enumerate(counts[batch, :whole]):
            logits = np.einsum("hd,hnd->hn", wide[0][:, row], wide[1][:, :seen]) / 8
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            expected[row] = np.einsum("hn,hnd->hd", weights, wide[2][:, :seen])
        errors = np.abs(result[batch, :whole] - expected)
        assert errors.max(initial=0) <= 3e-6 * np.abs(expected).max(initial=0)


def test_a_query_that_sees_no_key_weighs_all_the_same(harness):
    """As the least number is greater than none, scores have no digits left beside it."""
    made = function(1, 2, 200, 1, 32, masked=True)
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, n, 1, 32)).astype(np.float32) for n in (2, 200, 200))
    (result,) = harness.run(made, harness.schedule(made), [q, k, v, np.full((1, 1, 1, 200), LEAST)])
    assert np.abs(result[0, :, 0] - v[0, :, 0].astype(np.float64).mean(0)).max() <= 1e-5


@pytest.mark.parametrize("value", [np.nan, -1e30])
def test_what_is_no_hiding_mask_hides_nothing(harness, value):
    """NaN goes on to the result; what is far from the least number still compares."""
    made = function(1, 1, 100, 1, 32, masked=True)
    q, k, v = (np.ones((1, n, 1, 32), np.float32) for n in (1, 100, 100))
    v[0, 90:] = 3.0
    mask = np.full((1, 1, 1, 100), LEAST)
    mask[..., 95:] = value
    (result,) = harness.run(made, harness.schedule(made), [q, k, v, mask])
    assert np.isnan(result).all() if np.isnan(value) else np.abs(result - 3.0).max() <= 1e-5
