"""One small Llama as onnxruntime-genai's builder and torch export it, against onnxruntime: 200 tokens.

Needs transformers, PyTorch and onnxruntime-genai, and is skipped without.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import hybridc
from tests.support.machines import EAGER_GPU

CONTEXT, TOKENS, VOCABULARY = 256, 200, 512
PROMPT = [5, 17, 200, 3, 99, 42, 8, 150, 77, 31, 64]
_BUILDER = "onnxruntime_genai.models.builder"
_EXACT = ("--extra_options", "accuracy_level=1")
_SIZES = {"batch_size": 1, "sequence_length": [1, 8], "past_sequence_length": CONTEXT}
_SIZES |= {"total_sequence_length": CONTEXT, "kv_cache_dim": 32}
pytestmark = [pytest.mark.isa("avx2"), pytest.mark.slow]


_ROUNDED = 1e-4
"""Of logits: tokens are the same where less than this is off."""


@dataclass(frozen=True)
class Form:
    """How the decoder is exported, and how far its logits may be off, as a share of the greatest."""

    options: tuple[str, ...]
    """Of genai's builder; none: torch exports it."""
    off: float


FORMS = {
    # with accuracy_level 4 a CPU may round activations to 8 bits, and a GPU does not
    "int4": Form(("-p", "int4", "-e", "cpu", *_EXACT), _ROUNDED),
    "int4 qdq": Form(("-p", "int4", "-e", "cpu", *_EXACT, "use_qdq=true"), _ROUNDED),
    "fp32": Form(("-p", "fp32", "-e", "cpu"), _ROUNDED),
    # onnxruntime rounds every result of such a file to float16, ours are rounded where they are stored: where
    # two tokens are nearly as likely, either may be taken
    "int4 cuda": Form(("-p", "int4", "-e", "cuda", *_EXACT), 2e-3),
    "torch": Form((), _ROUNDED),
}
TARGETS: dict[str, dict[str, Any]] = {
    "avx2": {"target": "avx2"},
    "last logits": {"target": "avx2", "last_logits": True},
    "half a GPU": {"target": "cuda+avx2", "gpu_memory": ["50%"], "machine": EAGER_GPU, "plan_seconds": 0.1},
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Hugging Face's, with random weights."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("decoder")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)
    words = {"<unk>": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=FORMS)
def exported(
    request: pytest.FixtureRequest, decoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Form, Path, dict[str, Any]]:
    form, out = FORMS[request.param], tmp_path_factory.mktemp("exported")
    if not form.options:
        _export(decoder, out / "model.onnx")
        sizes = {"batch": 1, "tokens": [1, 8], "past": CONTEXT, "total": "past+tokens"}
        return form, out / "model.onnx", sizes
    pytest.importorskip("onnxruntime_genai")
    words = [sys.executable, "-m", _BUILDER, "-i", decoder, "-o", out, "-c", out / "cache", *form.options]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return form, out / "model.onnx", dict(_SIZES)


def _export(decoder: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache

    model = AutoModelForCausalLM.from_pretrained(decoder, attn_implementation="eager").eval()
    layers = model.config.num_hidden_layers

    class WithPast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any, positions: Any, past: Any) -> tuple[Any, ...]:
            cache = DynamicCache()
            for layer in range(layers):
                cache.update(past[2 * layer], past[2 * layer + 1], layer)
            made = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache
            )
            kept = made.past_key_values.layers
            return made.logits, *(each for layer in kept for each in (layer.keys, layer.values))

    past = tuple(torch.zeros(1, 2, 5, 32) for _ in range(2 * layers))
    ones = torch.ones(1, 3, dtype=torch.int64)
    example = ones, torch.ones(1, 8, dtype=torch.int64), torch.arange(5, 8)[None], past
    caches, presents = (
        [f"{name}.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
        for name in ("past_key_values", "present")
    )
    inputs = ["input_ids", "attention_mask", "position_ids", *caches]
    axes = {name: {0: "batch", 1: "tokens"} for name in ("input_ids", "position_ids", "logits")}
    axes |= {"attention_mask": {0: "batch", 1: "total"}}
    axes |= {name: {0: "batch", 2: "past"} for name in caches} | {
        n: {0: "batch", 2: "total"} for n in presents
    }
    with torch.no_grad():
        torch.onnx.export(
            WithPast(),
            example,
            str(out),
            input_names=inputs,
            output_names=["logits", *presents],
            dynamic_axes=axes,
            opset_version=18,
            dynamo=False,
        )


@pytest.fixture(scope="module")
def wanted(exported: tuple[Form, Path, dict[str, Any]]) -> tuple[list[int], np.ndarray]:
    """Greedy tokens, and the logits behind the prompt."""
    options = onnxruntime.SessionOptions()
    # else it rounds the activations of quantized weights to 8 bits, of its own accord
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(exported[1], options, providers=["CPUExecutionProvider"])
    inputs = {each.name: each.type for each in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    past = {
        name: np.zeros((1, 2, 0, 32), np.float16 if "16" in kind else np.float32)
        for name, kind in inputs.items()
        if name.startswith("past")
    }
    tokens, new, length, first = list[int](), list(PROMPT), 0, np.zeros(0)
    while len(tokens) < TOKENS:
        total = length + len(new)
        feeds: dict[str, Any] = {
            "input_ids": np.array([new]),
            "attention_mask": np.ones((1, total), np.int64),
        }
        if "position_ids" in inputs:
            feeds["position_ids"] = np.arange(length, total)[None]
        found = dict(zip(names, session.run(None, {**feeds, **past}), strict=True))
        past = {name: found[name.replace("past_key_values", "present")] for name in past}
        first = first if length else found["logits"][0, -1].astype(np.float64)
        length, new = total, [int(np.argmax(found["logits"][0, -1]))]
        tokens += new
    return tokens, first


@pytest.mark.parametrize("how", TARGETS)
def test_tokens_are_those_of_onnxruntime(
    exported: tuple[Form, Path, dict[str, Any]],
    wanted: tuple[list[int], np.ndarray],
    how: str,
    tmp_path: Path,
) -> None:
    form, model, sizes = exported
    tokens, first = wanted
    hybridc.compile(model, tmp_path / "m.hyb", dims=sizes, **TARGETS[how])
    emulated = "64MiB" if "cuda" in TARGETS[how]["target"] else None
    with hybridc.load_generation(tmp_path / "m.hyb", emulate_gpu=emulated) as session:
        (logits,) = session.append([PROMPT])
        assert np.abs(logits - first).max() <= form.off * np.abs(first).max()
        if form.off > _ROUNDED:
            return
        session.rewind(0)
        assert [token for (token,) in session.generate([PROMPT], TOKENS)] == tokens
