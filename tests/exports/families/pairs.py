"""Encoders with decoders, speech included, from transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.exports.architecture import Architecture, calling, ids, made, mask, normal

WORDS = 100
SIZES = {"batch": (2, 3), "sequence": (7, 10), "answer": (4, 5)}
T5: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
    "attn_implementation": "eager",  # torch cannot export its other form with dynamo
}
BART: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
}
WHISPER: dict[str, Any] = BART | {
    "num_mel_bins": 16,
    "max_source_positions": 20,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
WAVES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def encoder(model: Callable[[], nn.Module]) -> Architecture:
    inputs = {"input_ids": ids(WORDS, "batch", "sequence"), "attention_mask": mask("batch", "sequence")}
    return calling(model, inputs, ["last_hidden_state"], SIZES)


def decoder(model: Callable[[], nn.Module]) -> Architecture:
    inputs = {
        "input_ids": ids(WORDS, "batch", "answer"),
        "attention_mask": mask("batch", "answer"),
        "encoder_hidden_states": normal("batch", "sequence", 32),
    }
    return calling(model, inputs, ["last_hidden_state"], SIZES, use_cache=False)


def pair(model: Callable[[], nn.Module], result: str) -> Architecture:
    inputs = {
        "input_ids": ids(WORDS, "batch", "sequence"),
        "attention_mask": mask("batch", "sequence"),
        "decoder_input_ids": ids(WORDS, "batch", "answer"),
    }
    return calling(model, inputs, [result], SIZES, use_cache=False)


def waves(name: str, **options: Any) -> Architecture:
    inputs = {"input_values": normal("batch", "samples")}
    sizes = {"batch": (2, 3), "samples": (400, 520)}
    return calling(made(f"{name}Model", name, **WAVES, **options), inputs, ["last_hidden_state"], sizes)


PAIRS = {
    "t5_encoder": encoder(made("T5EncoderModel", "T5", **T5)),
    "t5_decoder": decoder(made("T5Model", "T5", part="decoder", **T5)),
    "t5": pair(made("T5ForConditionalGeneration", "T5", **T5), "logits"),
    "bart": pair(made("BartModel", "Bart", **BART), "last_hidden_state"),
    "marian": pair(made("MarianModel", "Marian", **BART, pad_token_id=0), "last_hidden_state"),
    "whisper_encoder": calling(
        made("WhisperModel", "Whisper", part="encoder", **WHISPER),
        {"input_features": normal("batch", 16, 40)},
        ["last_hidden_state"],
        {"batch": (2, 3)},
    ),
    "whisper_decoder": decoder(made("WhisperModel", "Whisper", part="decoder", **WHISPER)),
    "wav2vec2": waves("Wav2Vec2"),
    "wav2vec2_layer_norm": waves("Wav2Vec2", feat_extract_norm="layer", do_stable_layer_norm=True),
    "hubert": waves("Hubert"),
}
