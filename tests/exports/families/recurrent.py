"""Recurrent and one-dimensional convolutional networks in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.nn.utils.parametrizations import weight_norm

from tests.exports.architecture import Architecture, ids, normal

SIZES = {"batch": (2, 3), "time": (9, 13)}


class Recurrent(nn.Module):
    """A recurrent layer whose every result is used."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer = kind(12, 16, **options)

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        # an LSTM has two states, others one
        given = states if len(states) > 1 else states[0] if states else None
        y, last = self.layer(x, given)
        return (y, *last) if isinstance(last, tuple) else (y, last)


class Tagger(nn.Module):
    """Words, a bidirectional LSTM and a class for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 12)
        self.layers = nn.LSTM(12, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.classes = nn.Linear(32, 7)

    def forward(self, words: Tensor) -> Tensor:
        return self.classes(self.layers(self.words(words))[0]).softmax(-1)


class Reader(nn.Module):
    """Convolutions over an image of a line, then an LSTM along it, as in recognition of text."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d((2, 1)),
        )
        self.line = nn.LSTM(16 * 4, 16, bidirectional=True, batch_first=True)
        self.letters = nn.Linear(32, 11)

    def forward(self, image: Tensor) -> Tensor:
        x = self.image(image).permute(0, 3, 1, 2).flatten(2)
        return self.letters(self.line(x)[0]).log_softmax(-1)


class Listener(nn.Module):
    """Strided convolutions over a spectrum, then a bidirectional GRU, as in recognition of speech."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv2d(1, 6, (5, 5), stride=(2, 2), padding=(2, 2))
        self.layers = nn.GRU(6 * 8, 16, bidirectional=True, batch_first=True)
        self.norm, self.letters = nn.LayerNorm(32), nn.Linear(32, 11)

    def forward(self, spectrum: Tensor) -> Tensor:
        x = f.hardtanh(self.front(spectrum[:, None]), 0.0, 20.0)
        x = x.permute(0, 3, 1, 2).flatten(2)
        return self.letters(self.norm(self.layers(x)[0]))


class Causal(nn.Module):
    """A block of a temporal convolutional network."""

    def __init__(self, inner: int, outer: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.first = weight_norm(nn.Conv1d(inner, outer, 3, dilation=dilation))
        self.second = weight_norm(nn.Conv1d(outer, outer, 3, dilation=dilation))
        self.short = nn.Conv1d(inner, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = f.relu(self.first(f.pad(x, (self.pad, 0))))
        y = f.relu(self.second(f.pad(y, (self.pad, 0))))
        return f.relu(y + self.short(x))


class Gated(nn.Module):
    """Gated, dilated convolutions with skip connections, as in generators of sound."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Conv1d(1, 12, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(12, 24, 3, dilation=2**i, padding=2**i, padding_mode="reflect") for i in range(3)
        )
        self.skips = nn.ModuleList(nn.Conv1d(12, 12, 1) for _ in range(3))
        self.outlet = nn.Conv1d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        total = torch.zeros_like(x)
        for gate, skip in zip(self.gates, self.skips, strict=True):
            left, right = gate(x).chunk(2, dim=1)
            y = skip(left.tanh() * right.sigmoid())
            x, total = x + y, total + y
        return self.outlet(f.relu(total))


def sound() -> nn.Module:
    """Strided convolutions down to features, transposed ones up to a wave, as in a vocoder."""
    return nn.Sequential(
        nn.Conv1d(1, 8, 7, stride=2, padding=3),
        nn.ELU(),
        nn.Conv1d(8, 16, 5, stride=2, padding=2, groups=2),
        nn.GroupNorm(4, 16),
        nn.LeakyReLU(0.1),
        nn.ConvTranspose1d(16, 8, 4, stride=2, padding=1),
        nn.GELU(approximate="tanh"),
        nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1),
        nn.InstanceNorm1d(4, affine=True),
        nn.Tanh(),
    )


STEPS = normal("batch", "time", 12)
STATE = normal(2, "batch", 16)

RECURRENT = {
    "lstm": Architecture(lambda: Recurrent(nn.LSTM), {"x": normal("time", "batch", 12)}, SIZES),
    "lstm_both_ways": Architecture(
        lambda: Recurrent(nn.LSTM, bidirectional=True, batch_first=True), {"x": STEPS}, SIZES
    ),
    "lstm_states": Architecture(
        lambda: Recurrent(nn.LSTM, num_layers=2, batch_first=True),
        {"x": STEPS, "h": STATE, "c": STATE},
        SIZES,
    ),
    "lstm_projected": Architecture(
        lambda: Recurrent(nn.LSTM, batch_first=True, proj_size=8), {"x": STEPS}, SIZES
    ),
    "gru": Architecture(lambda: Recurrent(nn.GRU, batch_first=True), {"x": STEPS}, SIZES),
    "gru_both_ways": Architecture(
        lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True, batch_first=True), {"x": STEPS}, SIZES
    ),
    "gru_states": Architecture(
        lambda: Recurrent(nn.GRU, num_layers=2, batch_first=True), {"x": STEPS, "h": STATE}, SIZES
    ),
    "rnn": Architecture(lambda: Recurrent(nn.RNN, bidirectional=True), {"x": STEPS}, SIZES),
    "tagger": Architecture(Tagger, {"words": ids(50, "batch", "time")}, SIZES),
    "text_reader": Architecture(
        Reader, {"image": normal("batch", 1, 16, "width")}, {"batch": (2, 3), "width": (40, 56)}
    ),
    "listener": Architecture(
        Listener, {"spectrum": normal("batch", 16, "time")}, {"batch": (2, 3), "time": (20, 31)}
    ),
    "temporal": Architecture(
        lambda: nn.Sequential(Causal(6, 12, 1), Causal(12, 12, 2), Causal(12, 16, 4)),
        {"x": normal("batch", 6, "time")},
        {"batch": (2, 3), "time": (24, 30)},
    ),
    "gated_waves": Architecture(
        Gated, {"x": normal("batch", 1, "time")}, {"batch": (2, 3), "time": (40, 48)}
    ),
    "vocoder": Architecture(sound, {"x": normal("batch", 1, "time")}, {"batch": (2, 3), "time": (64, 96)}),
}
