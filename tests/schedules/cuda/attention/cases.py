"""Attention of drawn sizes and types, beside numpy in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np
from tvm import relax

from hybridc.passes.fuse.attention import Attention, TransposedOperand, attention_function
from hybridc.schedules.quantized_rows import with_rows
from hybridc.schedules.storage import stored
from tests.schedules.cuda.harness import Case
from tests.support.integer_rows import numbers_of, rows_of

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
MASKS = ("none", "keys", "causal", "late", "lowest", "cache", "unseen")
"""And "rows", which hides all keys of some rows, and "heads", whose heads see different keys or none."""


def drawn(
    generator: np.random.Generator,
    sizes: tuple[int, int, int, int],
    depth: int,
    width: int,
    mask: str,
    rule: str | None,
    dtypes: Mapping[int, str] | str = "float32",
    *,
    shared: int = 1,
    turned: bool = False,
    again: int = 1,
) -> Case:
    """Attention of `[batch, position, heads, depth]` tensors with scores / 8 and a mask.

    `sizes` are batch, queries, keys, heads; `dtypes` are types in memory by parameter, or one of all but
    masks; int8 is that of keys and values in rows of integers with a scale. Each head of keys is that of
    `shared` heads of queries. Neighbours in memory are columns of keys and values, or their positions if
    `turned`. The mask has its rows `again` so many times.
    """
    batch, rows, columns, heads = sizes

    def tensor(name: str, *shape: int) -> relax.Var:
        return relax.Var(name, relax.TensorType([int(e) for e in shape], "float32"))

    scores, scaled = (tensor(name, batch, heads, rows, columns) for name in ("scores", "scaled"))
    steps = [relax.op.divide(scores, relax.const(8.0, "float32"))]
    hidden = _mask(generator, mask, batch, rows // again, columns, heads)
    of_rows = tensor("rows", *hidden.shape)
    given = tensor("mask", *hidden.shape[:-2], rows, columns) if again > 1 else of_rows
    if mask != "none":
        steps.append(relax.op.add(scaled, given))
    axes = (0, 3, 1, 2) if turned else (0, 1, 2, 3)
    key, value = (
        tensor(name, *np.array((batch, columns, heads // shared, w))[list(axes)])
        for name, w in (("k", depth), ("v", width))
    )
    places = [axes.index(axis) for axis in range(4)]
    of_key, of_value = (tuple(places[axis] for axis in order) for order in ((0, 2, 3, 1), (0, 2, 1, 3)))
    match = Attention(
        query=TransposedOperand(tensor("q", batch, rows, heads, depth), (0, 2, 1, 3)),
        key=TransposedOperand(key, of_key).repeated(1, shared),
        value=TransposedOperand(value, of_value).repeated(1, shared),
        steps=tuple(steps),
        scores=scores,
        result_axes=(0, 2, 1, 3),
        members=(scores, scaled),
        hides_nan=mask == "rows",
        repeated={given: of_rows} if again > 1 else {},
    )
    function = attention_function(match)
    last = len(function.params) - 1
    if isinstance(dtypes, str):
        dtypes = {} if dtypes == "float32" else dict.fromkeys((0, 1, 2, last), dtypes)
    shapes = [(rows, heads, depth), (columns, heads // shared, depth), (columns, heads // shared, width)]
    in_rows = {i for i, dtype in dtypes.items() if dtype == "int8"}
    dtypes = {i: dtype for i, dtype in dtypes.items() if i not in in_rows}
    operands = [
        generator.standard_normal((batch, *shape)).astype(_numpy(dtypes.get(i, "float32")))
        for i, shape in enumerate(shapes)
    ]
    rows_of_integers = {i: rows_of(operands[i]) for i in in_rows}
    operands = [numbers_of(rows_of_integers[i]) if i in in_rows else x for i, x in enumerate(operands)]
    hidden = hidden.astype(_numpy(dtypes.get(3, "float32")) if mask != "none" else np.float32)
    tiled = np.tile(hidden, (again, 1)) if again > 1 else hidden
    expected, sizes_of_terms = _reference(operands, tiled)
    operands = [rows_of_integers.get(i, x) for i, x in enumerate(operands)]
    operands[1:] = [np.ascontiguousarray(x.transpose(axes)) for x in operands[1:]]
    inputs = operands if mask == "none" else [*operands, hidden]
    # of the weights, if tensor cores multiply them, and of the result
    rounded = ROUNDING.get(dtypes.get(1, ""), 0.0) if rule == "tensor_core_attention" else 0.0
    stored_as = ROUNDING.get(dtypes.get(last, ""), 0.0)
    scale = max(1.0, float(np.abs(expected).max()))
    error = rounded * sizes_of_terms + stored_as * np.abs(expected) + 4e-6 * scale
    function = stored(function, dtypes) if dtypes else function
    function = with_rows(function, in_rows) if in_rows else function
    return Case(function, inputs, expected, rule, absolute_error=error)


def drawn_of_one_tensor(
    generator: np.random.Generator,
    sizes: tuple[int, int, int],
    depth: int,
    rule: str | None,
    dtype: str = "float32",
    *,
    shared: int = 1,
) -> Case:
    """Attention whose queries, keys and values are neighbouring heads of one tensor, `sizes` being batch,
    positions and heads of queries, each `shared` of which have a head of keys."""
    batch, rows, heads = sizes
    parts = np.cumsum([0, heads, heads // shared, heads // shared])
    tensor = relax.Var("heads", relax.TensorType((batch, rows, int(parts[-1]), depth), "float32"))
    scores = relax.Var("scores", relax.TensorType((batch, heads, rows, rows), "float32"))
    query, key, value = (
        TransposedOperand(tensor, axes, part=(2, int(first), int(last)))
        for axes, first, last in zip(
            ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)), parts[:-1], parts[1:], strict=True
        )
    )
    match = Attention(
        query=query,
        key=key.repeated(1, shared),
        value=value.repeated(1, shared),
        steps=(relax.op.divide(scores, relax.const(8.0, "float32")),),
        scores=scores,
        result_axes=(0, 2, 1, 3),
        members=(scores,),
    )
    function = attention_function(match)
    data = generator.standard_normal((batch, rows, int(parts[-1]), depth)).astype(_numpy(dtype))
    expected, terms = _reference(np.split(data, parts[1:-1], axis=2), np.zeros((1, 1, 1, 1)))
    rounded = ROUNDING.get(dtype, 0.0)
    error = rounded * (terms + np.abs(expected)) + 4e-6 * max(1.0, float(np.abs(expected).max()))
    dtypes = {} if dtype == "float32" else dict.fromkeys(range(4), dtype)
    return Case(
        stored(function, dtypes) if dtypes else function, [data] * 3, expected, rule, absolute_error=error
    )


def _numpy(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def spoilt_behind(case: Case, end: int) -> Case:
    """The same with keys and values that are not numbers from a position on: where they are read the result
    is none either."""
    inputs = [array.copy() for array in case.inputs]
    for array in inputs[1:3]:
        array[:, end:] = np.nan
    return replace(case, inputs=inputs)


def _mask(
    generator: np.random.Generator, kind: str, batch: int, rows: int, columns: int, heads: int
) -> np.ndarray:
    seen = np.where(np.arange(columns) < columns // 3 + np.arange(rows)[:, None], 0, np.finfo(np.float32).min)
    of_head = np.arange(columns) < np.arange(heads)[:, None] * columns // heads
    hidden = {
        "none": np.zeros((1, 1, 1, 1)),
        "keys": np.where(generator.random((batch, 1, 1, columns)) < 0.3, -np.inf, 0),
        "causal": np.triu(np.full((rows, columns), -np.inf), 1),
        # whole tiles of keys in front are masked
        "late": np.where(np.arange(columns) < columns - 2, -np.inf, 0).reshape(1, 1, 1, columns),
        # all keys of some rows, by the least finite number: their weights are all the same
        "lowest": np.where(np.arange(rows) % 2, np.finfo(np.float32).min, 0).reshape(1, 1, rows, 1),
        # what a cache has room for behind what it holds; of which the first row sees nothing at all
        "cache": seen.reshape(1, 1, rows, columns),
        "unseen": np.where(np.arange(rows)[:, None] > 0, seen, np.finfo(np.float32).min)[None, None],
        "heads": np.where(of_head, 0, np.finfo(np.float32).min).reshape(1, heads, 1, columns),
        # all keys of some rows, whose results are zero
        "rows": np.where(np.arange(rows) % 2, -np.inf, 0).reshape(1, 1, rows, 1),
    }[kind]
    if kind == "keys":
        hidden[..., 0] = 0
    return hidden


def _reference(operands: list[np.ndarray], hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The result, and the same of the values' magnitudes."""
    query, key, value = (x.astype("float64").transpose(0, 2, 1, 3) for x in operands)
    key, value = (np.repeat(x, query.shape[1] // x.shape[1], 1) for x in (key, value))
    logits = query @ key.transpose(0, 1, 3, 2) / 8 + hidden.astype("float64")
    # as float32 adds them
    logits = np.maximum(logits, np.finfo(np.float32).min) if np.isfinite(hidden).all() else logits
    if hidden.min() == np.finfo(np.float32).min:
        logits = np.where(hidden < 0, hidden, logits)
    weights = np.exp(logits - np.maximum(logits.max(-1, keepdims=True), np.finfo(np.float32).min))
    weights /= np.maximum(weights.sum(-1, keepdims=True), np.finfo(np.float32).tiny)
    result, size = ((weights @ v).transpose(0, 2, 1, 3) for v in (value, np.abs(value)))
    return result, size
