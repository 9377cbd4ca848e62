"""Encoders of text, from transformers."""

from __future__ import annotations

from typing import Any

from tests.exports.architecture import Architecture, calling, ids, made, mask

WORDS = 100
SIZES = {"batch": (2, 3), "sequence": (7, 10)}
COMMON: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}


def encoder(name: str, *, types: bool = False, **options: Any) -> Architecture:
    """The encoder `NAMEModel` of transformers with a configuration of these options."""

    inputs = {
        "input_ids": ids(WORDS, "batch", "sequence"),
        "attention_mask": mask("batch", "sequence"),
        **({"token_type_ids": ids(2, "batch", "sequence")} if types else {}),
    }
    model = made(f"{name}Model", name, **{**COMMON, **options})
    return calling(model, inputs, ["last_hidden_state"], SIZES)


ENCODERS = {
    "bert": encoder("Bert", types=True),
    "distilbert": encoder("DistilBert", dim=32, n_heads=2, n_layers=2, hidden_dim=48),
    "roberta": encoder("Roberta"),
    "albert": encoder("Albert", embedding_size=16, types=True),
    "electra": encoder("Electra", embedding_size=16),
    "deberta_v2": encoder(
        "DebertaV2",
        relative_attention=True,
        position_buckets=4,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    "mpnet": encoder("MPNet"),
    "xlm_roberta": encoder("XLMRoberta"),
    "xmod": encoder("Xmod", languages=["en_XX"], default_language="en_XX"),
    "modernbert": encoder("ModernBert", global_attn_every_n_layers=2, local_attention=4, pad_token_id=0),
}
