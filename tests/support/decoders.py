"""Small decoders with random weights, and what onnxruntime makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from hybridc import models

CONTEXT, VOCABULARY = 256, 211
Rounding = Callable[[np.ndarray], np.ndarray]


def llama(
    *,
    batch: int = 1,
    int4: bool = True,
    int8: bool = False,
    dynamic_context: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """New tokens take their places in a cache of CONTEXT positions."""
    return models.build(
        "llama",
        batch=batch,
        context=CONTEXT,
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        feed_forward=96,
        vocabulary=VOCABULARY,
        int4=int4,
        int8_activations=int8,
        dynamic_context=dynamic_context,
        seed=seed,
    )


def with_open_lengths() -> onnx.ModelProto:
    """`llama` as onnxruntime-genai writes it: the past may be of any length, the total is the mask's."""
    return llama(int4=False, dynamic_context=True)


def appending() -> onnx.ModelProto:
    """One layer of standard operators: new positions are appended to a past of any length."""
    random, width, heads = np.random.default_rng(3), 32, 2
    depth = width // heads

    def split(name: str) -> str:
        return (
            f"{name}0 = MatMul (x, w{name}) {name}1 = Reshape (b, shape)".replace("(b,", f"({name}0,")
            + f" {name} = Transpose <perm=[0,2,1,3]> ({name}1) "
        )

    text = f"""
    <ir_version: 8, opset_import: ["" : 17]>
    g (int64[1,n] ids, int64[1,total] mask, int64[1,n] places,
       float[1,{heads},past,{depth}] pk, float[1,{heads},past,{depth}] pv)
      => (float[1,n,{VOCABULARY}] logits, float[1,{heads},all,{depth}] nk, float[1,{heads},all,{depth}] nv)
    {{
      e = Gather (table, ids) p = Gather (positions, places) x = Add (e, p)
      {split("q")} {split("k")} {split("v")}
      nk = Concat <axis=2> (pk, k) nv = Concat <axis=2> (pv, v)
      kt = Transpose <perm=[0,1,3,2]> (nk) s0 = MatMul (q, kt)
      m0 = Cast <to=1> (mask) m1 = Sub (m0, one) m2 = Mul (m1, big) m3 = Unsqueeze (m2, axes)
      before = Shape <start=2, end=3> (pk) first = Squeeze (before)
      after = Shape <start=2, end=3> (nk) end = Squeeze (after)
      keys = Range (none, end, step) new = Range (first, end, step) queries = Unsqueeze (new, last)
      is_seen = LessOrEqual (keys, queries) unseen = Not (is_seen) h0 = Cast <to=1> (unseen) h = Mul (h0, big)
      s1 = Add (s0, m3) s2 = Sub (s1, h) w = Softmax <axis=-1> (s2) c0 = MatMul (w, nv)
      c1 = Transpose <perm=[0,2,1,3]> (c0) c = Reshape (c1, flat) y = Add (x, c) logits = MatMul (y, head)
    }}"""
    weights = {
        "table": random.standard_normal((VOCABULARY, width)),
        "positions": random.standard_normal((CONTEXT, width)),
        **{f"w{n}": random.standard_normal((width, width)) / np.sqrt(width) for n in "qkv"},
        "head": random.standard_normal((width, VOCABULARY)) / np.sqrt(width),
        "one": np.array(1.0),
        "big": np.array(1e9),
    }
    model = onnx.parser.parse_model(text)
    shapes: dict[str, Any] = {"shape": [1, -1, heads, depth], "flat": [1, -1, width], "axes": [1, 2]}
    shapes |= {"none": 0, "step": 1, "last": [-1]}
    model.graph.initializer.extend(
        [numpy_helper.from_array(a.astype("f4"), n) for n, a in weights.items()]
        + [numpy_helper.from_array(np.array(a), n) for n, a in shapes.items()]
    )
    names = {"ids": "input_ids", "mask": "attention_mask", "places": "position_ids"}
    names |= {f"{old}{k[0]}": f"{new}.0.{k}" for k in ("key", "value") for old, new in _CACHES.items()}
    for node in model.graph.node:
        for field in (node.input, node.output):
            field[:] = [names.get(name, name) for name in field]
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    return model


def as_optimum() -> onnx.ModelProto:
    """`appending` with the names that optimum gives dimensions."""
    model = appending()
    names = {"n": "sequence_length", "past": "past_sequence_length"}
    names["total"] = "past_sequence_length + sequence_length"
    for value in model.graph.input:
        first, *others = value.type.tensor_type.shape.dim
        first.dim_param = "batch_size"
        for dim in others:
            if dim.dim_param:
                dim.dim_param = names[dim.dim_param]
    return model


_CACHES = {"p": "past_key_values", "n": "present"}


def greedy(model: onnx.ModelProto, prompt: Sequence[int], *, in_places: bool) -> Iterator[int]:
    """Tokens of onnxruntime, the prompt read at once, or one by one where the past grows."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = {i.name: i.shape for i in session.get_inputs()}
    pasts = {name: shape for name, shape in inputs.items() if name.startswith("past")}
    lengths = [shape[2] for shape in pasts.values()]
    room = (lengths[0] if isinstance(lengths[0], int) else CONTEXT) if in_places else 0
    cache = {name: np.zeros((*s[:2], room, s[3]), np.float32) for name, s in pasts.items()}
    length, new = 0, list(prompt)
    while True:
        part = new if in_places else new[:1]
        total = length + len(part)
        feeds = {"input_ids": np.array([part])}
        feeds["attention_mask"] = (np.arange(room or total) < total).astype(np.int64)[None]
        if "position_ids" in inputs:
            feeds["position_ids"] = np.array([[length]])
        logits, *presents = session.run(None, {**feeds, **cache})
        cache = dict(zip(cache, presents, strict=True))
        length, new = total, new[len(part) :]
        if not new:
            new = [int(np.argmax(logits[0, -1]))]
            yield new[0]


def logits_of(model: onnx.ModelProto, tokens: list[int], rounding: Rounding) -> Iterator[np.ndarray]:
    """Of onnxruntime behind each token, which are read one by one, with a cache that is rounded in
    between."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    pasts = {i.name: i.shape for i in session.get_inputs() if i.name.startswith("past")}
    has_places = any(i.name == "position_ids" for i in session.get_inputs())
    cache = {name: np.zeros((s[0], s[1], 0, s[3]), np.float32) for name, s in pasts.items()}
    for number, token in enumerate(tokens):
        feeds = {"input_ids": np.array([[token]]), "attention_mask": np.ones((1, number + 1), np.int64)}
        if has_places:
            feeds["position_ids"] = np.array([[number]])
        logits, *presents = session.run(None, {**feeds, **cache})
        rounded = [rounding(present) for present in presents]
        cache = dict(zip(cache, rounded, strict=True))
        yield logits[0, -1]
