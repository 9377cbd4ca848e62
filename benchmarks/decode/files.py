"""The files of one decoder that engines read."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from decode.engines import ROOM

KV_HEADS = 4


def decoder_files(
    folder: Path, settings: dict[str, int], context: int, prompt: int, target: str, has_bf16: bool
) -> dict[tuple[str, str], Path]:
    """By engine and arithmetic, what it loads. Engines that are not installed have none."""
    import hybridc
    from hybridc import models

    files: dict[tuple[str, str], Path] = {}
    for arithmetic in ("int8", "exact", *(("bf16",) if has_bf16 else ())):
        model = folder / f"{arithmetic}_{context}.onnx"
        shape: dict[str, Any] = {**settings, "int8_activations": arithmetic == "int8"}
        shape["kv_heads"] = KV_HEADS
        models.export("llama", model, **shape, context=context + ROOM)
        files["openvino", arithmetic] = model
        if arithmetic != "bf16":
            files["onnxruntime", arithmetic] = model
            if _is_there("onnxruntime_genai"):
                files["genai", arithmetic] = _genai_folder(model.with_suffix(""), shape, context + ROOM)
        if arithmetic == "int8" and _is_there("llama_cpp") and _is_there("gguf"):
            for kind in ("Q4_0", "Q4_K_M"):
                files[f"llama.cpp {kind}", arithmetic] = _gguf(model, kind, shape, context + ROOM)
        files["hybridc", arithmetic] = artifact = model.with_suffix(".hyb")
        hybridc.compile(
            model,
            artifact,
            target=target,
            dims={"sequence": [1, prompt]},
            precision="bf16" if arithmetic == "bf16" else "fp32",
        )
    return files


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _gguf(model: Path, kind: str, shape: dict[str, Any], context: int) -> Path:
    from decode.gguf_file import quantize_again, write_gguf

    first = model.with_suffix(".Q4_0.gguf")
    if kind == "Q4_0":
        write_gguf(model, first, heads=shape["heads"], kv_heads=shape["kv_heads"], context=context)
        return first
    out = model.with_suffix(f".{kind}.gguf")
    quantize_again(first, out, kind)
    return out


def _genai_folder(folder: Path, shape: dict[str, Any], context: int) -> Path:
    """A model whose past is of any length, and what onnxruntime-genai wants to know of it."""
    from hybridc import models

    folder.mkdir()
    models.export("llama", folder / "model.onnx", **shape, context=context, dynamic_context=True)
    kinds = ("key", "value")
    decoder = {
        "filename": "model.onnx",
        "session_options": {"provider_options": []},
        "hidden_size": shape["hidden"],
        "head_size": shape["hidden"] // shape["heads"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "num_hidden_layers": shape["layers"],
        "inputs": {name: name for name in ("input_ids", "attention_mask")}
        | {f"past_{kind}_names": f"past_key_values.%d.{kind}" for kind in kinds},
        "outputs": {"logits": "logits"} | {f"present_{kind}_names": f"present.%d.{kind}" for kind in kinds},
    }
    model = {"type": "llama", "context_length": context, "vocab_size": shape["vocabulary"]}
    model |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder": decoder}
    search = {"max_length": context, "past_present_share_buffer": True}
    (folder / "genai_config.json").write_text(json.dumps({"model": model, "search": search}, indent=1))
    return folder
