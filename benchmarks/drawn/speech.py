"""Speech encoders: strided 1-D convolutions shorten the signal, a transformer reads what is left."""

from __future__ import annotations

import numpy as np
import onnx

from drawn.case import Case, even
from hybridc.models.builder import GraphBuilder
from hybridc.models.transformer import attention, feed_forward, gelu

WAVEFORM = ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2))
"""Kernels and strides of wav2vec 2.0 (Baevski et al., NeurIPS 2020): 320 samples a position."""
SPECTRUM = ((3, 1), (3, 2))
"""Those of Whisper (Radford et al., 2022), over 80 frequencies."""


def draw_speech(rng: np.random.Generator) -> Case:
    """2 to 30 seconds of 16 kHz, as samples or as a spectrum of 100 frames a second."""
    is_waveform, seconds = bool(rng.integers(2)), float(np.exp(rng.uniform(np.log(2), np.log(30))))
    width, layers = even(rng, 256, 768, 64), int(rng.integers(1, 5))
    if is_waveform:
        channels, length, windows = even(rng, 128, 512, 32), int(seconds * 16000), WAVEFORM
    else:
        channels, length, windows = width, int(seconds * 100), SPECTRUM
    kind = "waveform" if is_waveform else "spectrum"
    name = f"speech {kind} of {length}, {channels} channels, width {width}, {layers} layers"
    return Case(name, lambda: encoder(1 if is_waveform else 80, length, channels, windows, width, layers))


def encoder(
    inputs: int,
    length: int,
    channels: int,
    windows: tuple[tuple[int, int], ...],
    width: int,
    layers: int,
) -> onnx.ModelProto:
    g = GraphBuilder("speech", 0)
    x = g.input("x", (1, inputs, length))
    for kernel, stride in windows:
        x = gelu(g, g.conv(x, channels, kernel, stride=stride, padding=1 if inputs > 1 else 0))
    x = g.transpose(x, 0, 2, 1)
    x = g.project(g.layer_norm(x, 1e-5), width) if channels != width else x
    for _ in range(layers):
        x = g.add(attention(g, g.layer_norm(x, 1e-5), width // 64), x)
        x = g.add(feed_forward(g, g.layer_norm(x, 1e-5), 4 * width), x)
    return g.model(y=g.layer_norm(x, 1e-5))
