"""Random numbers: drawn when the model is compiled, so that each run and each device has the same.

They are those of Philox4x64-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011), a function
of a key and an element's position. The key is the node's `seed`, as an integer or float32; of one without it,
its name.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    TRIP,
    Builder,
    Expansion,
    Unsupported,
    bounded,
    constant_of,
    dtype_of,
    given,
    is_used,
    operand,
    shape_of,
)


def uniform_numbers(key: tuple[int, int], count: int) -> np.ndarray:
    """float64 from 0 to below 1."""
    return (np.random.Philox(key=np.array(key, np.uint64)).random_raw(count) >> 11) * 2.0**-53


def normal_numbers(key: tuple[int, int], count: int) -> np.ndarray:
    """float64 of mean 0 and variance 1, by Box and Muller's transform of pairs."""
    first, second = uniform_numbers(key, 2 * -(-count // 2)).reshape(2, -1)
    radius, angle = np.sqrt(-2 * np.log1p(-first)), 2 * math.pi * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _key(node: ir.Node) -> tuple[int, int]:
    """A node in a loop has another one in each trip."""
    seed, trip = node.attributes.get("seed"), zlib.crc32(node.meta.get(TRIP, "").encode())
    if seed is None:
        return 1 << 32 | zlib.crc32((node.name or "").encode()), trip
    if seed.type == ir.AttributeType.INT:  # of Dropout
        return seed.as_int() & (1 << 64) - 1, trip
    return int(np.float32(seed.as_float()).view(np.uint32)), trip


def _drawn(node: ir.Node, shape: Sequence[int], dtype: int, build: Builder) -> Sequence[ir.Value]:
    count = math.prod(bounded(*shape))
    if "Normal" in node.op_type:
        scale, offset = (node.attributes.get_float(*each) for each in (("scale", 1.0), ("mean", 0.0)))
        numbers = normal_numbers(_key(node), count)
    else:
        low, high = (node.attributes.get_float(*each) for each in (("low", 0.0), ("high", 1.0)))
        scale, offset = high - low, low
        numbers = uniform_numbers(_key(node), count)
    return [build.constant((numbers * scale + offset).reshape(shape), ir.DataType(dtype))]


def _of_shape(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    shape = node.attributes["shape"].as_ints()
    if min(shape, default=0) < 0:
        raise Unsupported("needs a shape without negative extents")
    return _drawn(node, shape, node.attributes.get_int("dtype", int(ir.DataType.FLOAT)), build)


def _like(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    x = operand(node, 0)
    dtype = node.attributes.get_int("dtype", None)
    return _drawn(node, shape_of(x), int(dtype_of(x)) if dtype is None else dtype, build)


def _bernoulli(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """1 with the probability that the element is."""
    x = operand(node, 0)
    shape, own = shape_of(x), dtype_of(x)
    kind = ir.DataType.DOUBLE if own == ir.DataType.DOUBLE else ir.DataType.FLOAT
    numbers = uniform_numbers(_key(node), math.prod(bounded(*shape))).reshape(shape)
    if kind == ir.DataType.FLOAT:  # rounding may not make a 1 of a number below it
        numbers = np.minimum(numbers, 1 - 2.0**-24)
    is_one = build.op("Less", build.constant(numbers, kind), build.cast(x, kind))
    dtype = node.attributes.get_int("dtype", None)
    return [build.op("Cast", is_one, to=int(own) if dtype is None else dtype)]


def _multinomial(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Classes by logarithms of their probabilities [batch, classes]: where sums of these pass a number."""
    if build.opset < 11:
        raise Unsupported("needs opset 11")
    x = operand(node, 0)
    batch, classes = shape_of(x)
    samples = node.attributes.get_int("sample_size", 1)
    wide = build.cast(x, ir.DataType.FLOAT)
    shares = build.op("Exp", build.op("Sub", wide, build.reduce("ReduceMax", wide, [1])))
    sums = build.op("CumSum", shares, build.constant(1, "int64"))
    total = build.slice(sums, 1, classes - 1, classes)
    numbers = uniform_numbers(_key(node), math.prod(bounded(batch, samples, classes)) // classes)
    places = build.op("Mul", total, build.constant(numbers.reshape(batch, samples), "float32"))
    is_passed = build.op("LessOrEqual", build.unsqueeze(sums, [1]), build.unsqueeze(places, [2]))
    chosen = build.reduce("ReduceSum", build.cast(is_passed, ir.DataType.INT32), [2], keepdims=False)
    # a sum that is rounded may not pass the total
    inside = build.op("Min", chosen, build.constant(classes - 1, "int32"))
    return [build.op("Cast", inside, to=node.attributes.get_int("dtype", int(ir.DataType.INT32)))]


def _dropout(node: ir.Node, build: Builder) -> Sequence[ir.Value | None] | None:
    """As a network is trained: zeros, where numbers are below `ratio`. Else what it is fed, and a mask of
    ones if one is asked for."""
    x = operand(node, 0)
    shape, training, wants_mask = shape_of(x), given(node, 2), is_used(node, 1)
    is_on = training is not None and bool(constant_of(training, "a training mode").any())
    if not is_on:
        ones = build.constant(np.ones(bounded(*shape)), ir.DataType.BOOL) if wants_mask else None
        mask = ones if ones is None or build.opset >= 10 else build.cast(ones, dtype_of(x))
        return [build.op("Identity", x), mask] if wants_mask else None
    own = dtype_of(x)
    ratio = given(node, 1)
    share = build.constant(0.5, own) if ratio is None else build.cast(ratio, own)
    kind = ir.DataType.DOUBLE if own == ir.DataType.DOUBLE else ir.DataType.FLOAT
    numbers = uniform_numbers(_key(node), math.prod(bounded(*shape))).reshape(shape)
    stays = build.op("GreaterOrEqual", build.constant(numbers, kind), build.cast(share, kind))
    scaled = build.op("Div", x, build.op("Sub", build.like(x, 1), share))
    return [build.op("Where", stays, scaled, build.like(x, 0)), stays if wants_mask else None]


STANDARD: Mapping[str, Expansion] = {
    "Bernoulli": _bernoulli,
    "Dropout": _dropout,
    "Multinomial": _multinomial,
    "RandomNormal": _of_shape,
    "RandomNormalLike": _like,
    "RandomUniform": _of_shape,
    "RandomUniformLike": _like,
}
