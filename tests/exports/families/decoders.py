"""Decoders of text, with keys and values of what was read before as inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.exports.architecture import Architecture, Fed, calling, ids, made, mask, normal

WORDS = 100
LAYERS = 2
COMMON: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class WithPast(nn.Module):
    """A decoder's step: keys and values of each layer follow the words and the mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor, seen: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        import transformers

        cache = transformers.DynamicCache()
        for layer in range(LAYERS):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        found = self.model(input_ids=words, attention_mask=seen, past_key_values=cache, use_cache=True)
        present = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return (found.logits, *present)


GPT2 = made("GPT2LMHeadModel", "GPT2", vocab_size=WORDS, n_embd=32, n_head=2, n_layer=LAYERS, n_positions=40)


def of(name: str, **options: Any) -> Callable[[], nn.Module]:
    """The decoder of transformers with a configuration of these options."""
    return made(f"{name}ForCausalLM", name, **{**COMMON, **options})


def prompt(model: Callable[[], nn.Module]) -> Architecture:
    """Reads words that nothing comes before."""
    inputs = {"input_ids": ids(WORDS, "batch", "sequence"), "attention_mask": mask("batch", "sequence")}
    return calling(model, inputs, ["logits"], {"batch": (2, 3), "sequence": (7, 10)}, use_cache=False)


def experts(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """All experts' products in one, which is a form that torch can export."""

    def build() -> nn.Module:
        whole: Any = model()
        whole.set_experts_implementation("batched_mm")
        return whole

    return build


def step(model: Callable[[], nn.Module], heads: int, width: int, past: tuple[int, int]) -> Architecture:
    """Reads words behind `past` others, in an export and in the run of one with open dimensions."""
    sizes = {"batch": (2, 3), "sequence": (3, 2), "past": past}
    sizes["total"] = (past[0] + 3, past[1] + 2)
    inputs = {"input_ids": ids(WORDS, "batch", "sequence"), "attention_mask": Fed("seen", ("batch", "total"))}
    for layer in range(LAYERS):
        for kind in ("key", "value"):
            inputs[f"past_{kind}_{layer}"] = normal("batch", heads, "past", width)
    return Architecture(lambda: WithPast(model()), inputs, sizes)


class Causal(nn.Module):
    """A small GPT in plain torch, with its own causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Embedding(40, 32)
        self.joined, self.out = nn.Linear(32, 96), nn.Linear(32, WORDS, bias=False)
        self.norm = nn.LayerNorm(32)

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        x = self.words(words) + self.places(torch.arange(length))
        q, k, v = (
            part.reshape(words.shape[0], length, 4, 8).transpose(1, 2)
            for part in self.joined(self.norm(x)).split(32, dim=2)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x + mixed.transpose(1, 2).reshape(words.shape[0], length, 32))


DECODERS = {
    "gpt2": prompt(GPT2),
    "gpt2_past": step(GPT2, heads=2, width=16, past=(4, 6)),
    "gpt2_empty_past": step(GPT2, heads=2, width=16, past=(4, 0)),
    "llama": replace(prompt(of("Llama")), opset=23),
    "llama_past": step(of("Llama"), heads=2, width=8, past=(4, 6)),
    "mistral": prompt(of("Mistral", sliding_window=4)),
    "qwen2": prompt(of("Qwen2")),
    "qwen3_past": step(of("Qwen3"), heads=2, width=8, past=(4, 6)),
    "gemma2": prompt(of("Gemma2", sliding_window=4, query_pre_attn_scalar=8)),
    "phi3": prompt(of("Phi3")),
    "bloom": prompt(made("BloomForCausalLM", "Bloom", vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4)),
    "mixtral": prompt(experts(of("Mixtral", num_local_experts=4))),
    "mamba": calling(
        made(
            "MambaForCausalLM", "Mamba", vocab_size=WORDS, hidden_size=32, state_size=4, num_hidden_layers=2
        ),
        {"input_ids": ids(WORDS, "batch", "sequence")},
        ["logits"],
        {"batch": (2, 3), "sequence": (7, 10)},
        use_cache=False,
    ),
    "gpt_plain": Architecture(
        Causal,
        {"input_ids": ids(WORDS, "batch", "sequence")},
        {"batch": (2, 3), "sequence": (7, 10)},
        opset=23,
    ),
}
