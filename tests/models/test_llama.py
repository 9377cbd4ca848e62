"""The decoder against transformers' Llama of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper

from hybridc import models
from hybridc.errors import UsageError

SMALL: dict[str, Any] = {
    "context": 32,
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "feed_forward": 96,
    "vocabulary": 50,
}


def feeds(length: int, layers: int = 2) -> dict[str, np.ndarray]:
    past = {
        f"past_key_values.{n}.{kind}": np.zeros((1, 2, 32, 16), np.float32)
        for n in range(layers)
        for kind in ("key", "value")
    }
    ids = np.random.default_rng(0).integers(0, 50, (1, length))
    return {"input_ids": ids, "attention_mask": (np.arange(32) < length).astype(np.int64)[None], **past}


@pytest.mark.parametrize("int4", [False, True])
def test_model_is_valid_and_its_logits_are_varied(int4: bool) -> None:
    model = models.build("llama", **SMALL, int4=int4)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    logits, *presents = session.run(None, feeds(7))
    assert logits.shape == (1, 7, 50) and 0.3 < logits.std() < 3
    assert [each.shape for each in presents] == [(1, 2, 32, 16)] * 4
    kinds = {node.op_type for node in model.graph.node}
    assert ("MatMulNBits" in kinds) == int4 and ("MatMul" in kinds) != int4


def test_same_seed_gives_the_same_bytes() -> None:
    first, again, other = (
        models.build("llama", **SMALL, seed=seed).SerializeToString() for seed in (1, 1, 2)
    )
    assert first == again != other


def test_accuracy_level_is_that_asked_for() -> None:
    for asked, level in ((False, 1), (True, 4)):
        nodes = models.build("llama", **SMALL, int8_activations=asked).graph.node
        products = [node for node in nodes if node.op_type == "MatMulNBits"]
        levels = {a.i for node in products for a in node.attribute if a.name == "accuracy_level"}
        assert levels == {level} and len(products) == 2 * 5 + 1


def test_without_weights_tensors_have_their_shapes_and_types(tmp_path: Path) -> None:
    whole = models.build("llama", **SMALL)
    bare = onnx.load(
        models.export("llama", tmp_path / "m.onnx", weights=False, **SMALL), load_external_data=False
    )
    assert whole.graph.node == bare.graph.node
    tensors = [[(t.name, t.data_type, tuple(t.dims)) for t in m.graph.initializer] for m in (whole, bare)]
    assert tensors[0] == tensors[1]
    kept = {t.name for t in bare.graph.initializer if t.data_location != TensorProto.EXTERNAL}
    assert {"context", "one"} <= kept and "embedding" not in kept


def test_llama_7b_has_the_published_number_of_parameters(tmp_path: Path) -> None:
    path = models.export("llama_7b", tmp_path / "m.onnx", weights=False)
    tensors = onnx.load(path, load_external_data=False).graph.initializer
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in tensors}
    two_in_a_byte = sum(n for name, n in sizes.items() if name.startswith("product") and "weight" in name)
    others = sum(n for name, n in sizes.items() if name == "embedding" or "norm" in name)
    assert 2 * two_in_a_byte + others == 6_738_415_616  # Touvron et al., Llama 2, 2023


@pytest.mark.parametrize(
    "wrong", [{"heads": 3}, {"kv_heads": 3}, {"heads": 8}, {"block": 24}, {"feed_forward": 90}, {"layers": 0}]
)
def test_impossible_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        models.build("llama", **{**SMALL, **wrong})
    assert caught.value.code == "HC502"


def test_float32_logits_are_those_of_transformers() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = models.build("llama", **SMALL, int4=False)
    weights = {w.name: numpy_helper.to_array(w) for w in model.graph.initializer}
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=50,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    products = iter([w.T for n, w in weights.items() if n.startswith("product_")])
    norms = iter([w for n, w in weights.items() if n.startswith("norm_")])
    state = {"model.embed_tokens.weight": weights["embedding"]}
    for n in range(2):
        at = f"model.layers.{n}."
        query, key, value = np.split(next(products), [64, 96])
        state |= {
            f"{at}self_attn.{k}_proj.weight": w for k, w in zip("qkv", (query, key, value), strict=True)
        }
        state[f"{at}self_attn.o_proj.weight"] = next(products)
        state |= {f"{at}mlp.{k}_proj.weight": next(products) for k in ("gate", "up", "down")}
        state |= {f"{at}{k}_layernorm.weight": next(norms) for k in ("input", "post_attention")}
    state |= {"lm_head.weight": next(products), "model.norm.weight": next(norms)}
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.load_state_dict({name: torch.tensor(np.ascontiguousarray(w)) for name, w in state.items()})
    fed = feeds(9)
    with torch.no_grad():
        wanted = reference(torch.tensor(fed["input_ids"])).logits.numpy()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, fed)[0], wanted, rtol=0, atol=2e-4)
