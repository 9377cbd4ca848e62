"""Engines that read a decoder's tokens.

Each is made of a file, an arithmetic, a number of tokens before and a number of threads. Products are told
to be what the arithmetic says, in the engine's own words: rounded to 8 bits (`int8`), float32 (`exact`) or
bf16.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Step = Callable[[int, int], np.ndarray]
"""Reads so many tokens behind so many others, and gives the logits of each, or of the last one."""

ROOM = 32
"""Positions of the cache behind the context; engines attend to what is filled, or to all of it."""
_OPENVINO_SETTINGS: dict[str, dict[str, Any]] = {
    # OpenVINO's own choice for weights of 4 bits: it rounds activations to 8 bits in groups of 32
    "int8": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 32},
    "exact": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "INFERENCE_PRECISION_HINT": "f32"},
    "bf16": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "INFERENCE_PRECISION_HINT": "bf16"},
}


def token_ids(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(3, 2000, (1, count))


def _feeds(before: int, count: int, room: int) -> dict[str, np.ndarray]:
    return {
        "input_ids": token_ids(count),
        "attention_mask": (np.arange(room) < before + count).astype(np.int64)[None],
    }


def _hybridc(path: Path, arithmetic: str, context: int, threads: int) -> Step:
    from hybridc import load_generation

    session = load_generation(path, threads=threads)

    def step(before: int, count: int) -> np.ndarray:
        (read,) = session.sequences
        if len(read) < before:  # in the first step behind a context
            session.append(token_ids(before)[:, len(read) :].tolist())
        session.rewind(before)
        return session.append(token_ids(count).tolist())

    return step


def _onnxruntime(path: Path, arithmetic: str, context: int, threads: int) -> Step:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    pasts = {i.name: i.shape for i in session.get_inputs() if i.name.startswith("past")}
    random = np.random.default_rng(0)
    cache = {
        name: ort.OrtValue.ortvalue_from_numpy(random.standard_normal(shape).astype(np.float32) * 0.1)
        for name, shape in pasts.items()
    }

    def step(before: int, count: int) -> np.ndarray:
        binding = session.io_binding()
        for name, array in _feeds(before, count, context + ROOM).items():
            binding.bind_cpu_input(name, array)
        for name, value in cache.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        return binding.get_outputs()[-1].numpy()

    return step


def _genai(path: Path, arithmetic: str, context: int, threads: int) -> Step:
    import onnxruntime_genai as genai

    config = genai.Config(str(path))
    options = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    model = genai.Model(config)
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=context + ROOM, do_sample=False)
    generator = genai.Generator(model, settings)

    def step(before: int, count: int) -> np.ndarray:
        if generator.token_count() < before:  # in the first step behind a context
            generator.append_tokens(token_ids(before)[0, generator.token_count() :].astype(np.int32))
        generator.rewind_to(before)
        generator.append_tokens(token_ids(count)[0].astype(np.int32))
        return generator.get_output("logits")

    return step


def _openvino(path: Path, arithmetic: str, context: int, threads: int) -> Step:
    import openvino as ov

    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    settings |= _OPENVINO_SETTINGS[arithmetic]
    request = ov.Core().compile_model(str(path), "CPU", settings).create_infer_request()
    random = np.random.default_rng(0)
    cache = {
        port.any_name: random.standard_normal([d.get_length() for d in port.partial_shape]).astype("f4") * 0.1
        for port in request.model_inputs
        if port.any_name.startswith("past")
    }

    def step(before: int, count: int) -> np.ndarray:
        found = request.infer({**_feeds(before, count, context + ROOM), **cache}, share_inputs=True)
        return found["logits"]

    return step


def _llama_cpp(path: Path, arithmetic: str, context: int, threads: int) -> Step:
    import llama_cpp

    model = llama_cpp.Llama(
        str(path),
        n_ctx=context + ROOM,
        n_batch=context + ROOM,
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        # of each token, as the others do
        logits_all=True,
        verbose=False,
    )

    def step(before: int, count: int) -> np.ndarray:
        if model.n_tokens < before:  # in the first step behind a context
            model.eval(token_ids(before)[0, model.n_tokens :].tolist())
        model.n_tokens = before
        model.eval(token_ids(count)[0].tolist())
        return model.scores[before : before + count]

    return step


ENGINES: dict[str, Callable[[Path, str, int, int], Step]] = {
    "hybridc": _hybridc,
    "onnxruntime": _onnxruntime,
    "genai": _genai,
    "openvino": _openvino,
    "llama.cpp Q4_0": _llama_cpp,
    "llama.cpp Q4_K_M": _llama_cpp,
}
