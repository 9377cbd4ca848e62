"""A Llama of hybridc's models as a GGUF file, for llama.cpp.

`Q4_0` has the codes of MatMulNBits as they are: blocks of 32, code 8 is zero. Its scales are float16, theirs
are float32, which is all the difference. Other kinds are made of it by llama.cpp.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnx
from onnx import numpy_helper

BLOCK = 32
_KINDS = {"Q4_K_M": 15}
"""llama.cpp's numbers of file types (llama.h)."""


def write_gguf(model: Path, out: Path, *, heads: int, kv_heads: int, context: int) -> None:
    """Of a `models.llama` with int4 weights in blocks of 32, as Q4_0."""
    graph = onnx.load(model).graph
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    layers = sum(i.name.startswith("past") for i in graph.input) // 2
    embedding = found["embedding"]
    vocabulary, hidden = embedding.shape
    depth = hidden // heads
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(len(found["product_2.weight"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(depth)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(vocabulary)])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([2, 3, 3] + [1] * (vocabulary - 3))

    def add(name: str, product: int, rows: slice = slice(None), rotated: int = 0) -> None:
        codes = found[f"product_{product}.weight"][rows]
        scales = found[f"product_{product}.scales"].reshape(len(found[f"product_{product}.weight"]), -1)[rows]
        packed = _q4_0(codes, scales)
        if rotated:
            packed = _neighbours(packed, rotated)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def norm(name: str, number: int) -> None:
        writer.add_tensor(f"{name}.weight", found[f"norm_{number}.weight"].astype(np.float32))

    # half precision, as llama.cpp's own converter writes it: a row of it is read for each token
    writer.add_tensor("token_embd.weight", embedding.astype(np.float16))
    keys, values = hidden + kv_heads * depth, hidden + 2 * kv_heads * depth
    for layer in range(layers):
        first, block = 5 * layer, f"blk.{layer}"
        norm(f"{block}.attn_norm", 2 * layer)
        add(f"{block}.attn_q", first, slice(0, hidden), heads)
        add(f"{block}.attn_k", first, slice(hidden, keys), kv_heads)
        add(f"{block}.attn_v", first, slice(keys, values))
        add(f"{block}.attn_output", first + 1)
        norm(f"{block}.ffn_norm", 2 * layer + 1)
        for part, name in enumerate(("gate", "up", "down")):
            add(f"{block}.ffn_{name}", first + 2 + part)
    norm("output_norm", 2 * layers)
    add("output", 5 * layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize_again(source: Path, out: Path, kind: str) -> None:
    """Another kind of int4 weights of a GGUF file."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize = _KINDS[kind], True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), settings):
        raise RuntimeError(f"llama.cpp makes no {kind} of {source}")


def _q4_0(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[rows, blocks, 16] and [rows, blocks] to ggml's blocks, uint8 [rows, blocks * 18].

    A byte of MatMulNBits has elements 2 n and 2 n + 1, one of ggml n and n + 16.
    """
    elements = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], BLOCK)
    packed = elements[..., : BLOCK // 2] | elements[..., BLOCK // 2 :] << 4
    half = scales.astype(np.float16)[..., None].view(np.uint8)
    return np.concatenate([half, packed.astype(np.uint8)], axis=-1).reshape(len(codes), -1)


def _neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order in which llama.cpp rotates pairs: neighbours, not halves of a head."""
    depth = len(rows) // heads
    pairs = rows.reshape(heads, 2, depth // 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(pairs.reshape(rows.shape))
