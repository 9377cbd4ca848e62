"""Llama, a decoder of language models, in the form of onnxruntime-genai's model builder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from hybridc.models.builder import LINEAR_GAIN, Dim, GraphBuilder, Value, require

_EPSILON = 1e-5
_ROTARY_BASE = 10000.0
_KINDS = ("key", "value")
_CODE_STD = np.sqrt((15**2 - 1) / 12)
"""Standard deviation of a code that is uniform from 1 to 15."""


@dataclass(frozen=True, slots=True)
class _Products:
    """How the weights of products are stored."""

    int4: bool
    block: int
    accuracy_level: int

    def apply(self, g: GraphBuilder, x: Value, features: int, gain: float = LINEAR_GAIN) -> Value:
        """x [..., K] to [..., features], without a bias."""
        name, depth = g.fresh("product"), x.size(-1)
        shape, std = (*x.shape[:-1], features), gain / np.sqrt(depth)
        if not self.int4:
            return g.apply(
                "MatMul", [x, g.normal(f"{name}.weight", (depth, features), std)], shape, name=name
            )
        blocks = depth // self.block
        codes = g.constant(f"{name}.weight", g.int4_pairs((features, blocks, self.block // 2)))
        scale = g.uniform(0.9, 1.1, features * blocks).reshape(features, blocks) * (std / _CODE_STD)
        scales = g.constant(f"{name}.scales", scale.astype(np.float32))
        attributes = {"K": depth, "N": features, "bits": 4, "block_size": self.block}
        (result,) = g.contributed(
            "MatMulNBits",
            [x, codes, scales],
            [shape],
            name=name,
            accuracy_level=self.accuracy_level,
            **attributes,
        )
        return result


@dataclass(frozen=True, slots=True)
class _Attention:
    """What all layers share."""

    heads: int
    kv_heads: int
    depth: int
    lengths: Value
    """int32 [batch]: positions of each sequence after the run, less one."""
    total: Value
    """int32: positions that the cache has room for."""
    tables: tuple[Value, Value]
    """Cosines and sines of the rotary embedding, [context, depth / 2]."""

    def apply(self, g: GraphBuilder, packed: Value, past: tuple[Value, Value]) -> tuple[Value, Value, Value]:
        """Queries, keys and values side by side, and the cache, to what is seen and the new cache."""
        missing = Value("", ())
        width = self.heads * self.depth
        seen, key, value = g.contributed(
            "GroupQueryAttention",
            [packed, missing, missing, *past, self.lengths, self.total, *self.tables],
            [(*packed.shape[:-1], width), past[0].shape, past[1].shape],
            num_heads=self.heads,
            kv_num_heads=self.kv_heads,
            do_rotary=1,
        )
        return seen, key, value


def llama(
    *,
    batch: int = 1,
    context: int = 2048,
    layers: int = 22,
    hidden: int = 2048,
    heads: int = 32,
    kv_heads: int = 4,
    feed_forward: int = 5632,
    vocabulary: int = 32000,
    int4: bool = True,
    block: int = 32,
    int8_activations: bool = False,
    dynamic_context: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """TinyLlama (Zhang et al., 2024): a Llama decoder with a cache of `context` positions.

    Products have 4-bit weights in blocks of `block`, as com.microsoft.MatMulNBits, or float32 ones;
    `int8_activations` sets their accuracy_level to 4. With `dynamic_context` the past has any length up to
    `context`, and the mask the same: past_sequence_length and total_sequence_length.

    input_ids int64 [batch, sequence], of any length; attention_mask int64 [batch, context]: 1 for positions
    up to the last new one, then 0; past_key_values.N.key and .value [batch, kv_heads, context, hidden /
    heads]. To logits [batch, sequence, vocabulary], and present.N.key and .value of the past's shape.
    """
    require(hidden % heads == 0, f"{heads} heads do not divide a hidden width of {hidden}")
    require(heads % kv_heads == 0, f"{kv_heads} heads of keys do not divide {heads} heads")
    depth = hidden // heads
    require(depth % 16 == 0, f"a head of {depth} is not a multiple of 16", "choose fewer heads")
    widths = (hidden, feed_forward)
    known = block >= 16 and not block & (block - 1) and all(width % block == 0 for width in widths)
    require(not int4 or known, f"blocks of {block} do not divide {hidden} and {feed_forward}")
    g = GraphBuilder("llama", seed)
    products = _Products(int4, block, 4 if int8_activations else 1)
    ids = g.input("input_ids", (batch, "sequence"), TensorProto.INT64)
    past: Dim = "past_sequence_length" if dynamic_context else context
    mask_shape = (batch, "total_sequence_length" if dynamic_context else context)
    mask = g.input("attention_mask", mask_shape, TensorProto.INT64)
    cache = (batch, kv_heads, past, depth)
    pasts = [tuple(g.input(f"past_key_values.{n}.{kind}", cache) for kind in _KINDS) for n in range(layers)]
    attention = _Attention(heads, kv_heads, depth, *_lengths(g, mask), _rotary(g, context, depth))
    x, presents = g.gather(g.normal("embedding", (vocabulary, hidden), 1.0), ids), dict[str, Value]()
    for n, (key, value) in enumerate(pasts):
        packed = products.apply(g, _rms_norm(g, x), hidden + 2 * kv_heads * depth)
        seen, *present = attention.apply(g, packed, (key, value))
        presents |= {f"present.{n}.{kind}": each for kind, each in zip(_KINDS, present, strict=True)}
        x = g.add(x, products.apply(g, seen, hidden))
        x = g.add(x, _feed_forward(g, _rms_norm(g, x), feed_forward, products))
    return g.model(logits=products.apply(g, _rms_norm(g, x), vocabulary), **presents)


def _lengths(g: GraphBuilder, mask: Value) -> tuple[Value, Value]:
    """From the mask, how many positions each sequence has, less one; and the room for them."""
    batch, one = mask.shape[:1], g.constant("one", np.array(1, np.int64))
    axes = g.constant("mask_axes", np.array([1], np.int64))
    counts = g.apply("ReduceSum", [mask, axes], batch, keepdims=0)
    before = g.apply("Sub", [counts, one], batch)
    lengths = g.apply("Cast", [before], batch, dtype=TensorProto.INT32, to=TensorProto.INT32)
    context = mask.shape[-1]
    if isinstance(context, int):
        return lengths, g.constant("context", np.array(context, np.int32))
    shape = g.apply("Shape", [mask], (2,), dtype=TensorProto.INT64)
    total = g.apply("Gather", [shape, one], (), dtype=TensorProto.INT64)
    return lengths, g.apply("Cast", [total], (), dtype=TensorProto.INT32, to=TensorProto.INT32)


def _rotary(g: GraphBuilder, context: int, depth: int) -> tuple[Value, Value]:
    """Rotary embedding (Su et al., RoFormer, 2021)."""
    rates = _ROTARY_BASE ** (-np.arange(0, depth, 2) / depth)
    angles = np.arange(context)[:, None] * rates
    cosines, sines = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    return g.constant("cosines", cosines), g.constant("sines", sines)


def _rms_norm(g: GraphBuilder, x: Value) -> Value:
    """Zhang and Sennrich, Root mean square layer normalization (NeurIPS 2019), spelled as exporters do."""
    square, reduced = g.binary("Mul", x, x), (*x.shape[:-1], 1)
    mean = g.apply("ReduceMean", [square], reduced, axes=[-1], keepdims=1)
    root = g.unary("Sqrt", g.add(mean, g.scalar(_EPSILON)))
    scale = g.constant(f"{g.fresh('norm')}.weight", g.uniform(0.8, 1.2, x.size(-1)))
    return g.binary("Mul", g.binary("Div", x, root), scale)


def _feed_forward(g: GraphBuilder, x: Value, width: int, products: _Products) -> Value:
    """SwiGLU (Shazeer, GLU variants improve transformer, 2020)."""
    gate, up = (products.apply(g, x, width) for _ in range(2))
    return products.apply(g, g.binary("Mul", g.binary("Mul", gate, g.unary("Sigmoid", gate)), up), x.size(-1))
