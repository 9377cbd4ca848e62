"""How the next token is chosen from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridc.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; the default takes the likeliest.

    In this order: repetition penalty, temperature, `top_k`, `top_p`, `min_p`, as in transformers and
    llama.cpp. Raises UsageError HC596 for a value that makes no sense.
    """

    temperature: float = 0.0
    """What logits are divided by; 0 takes the likeliest token (the first one of several)."""
    top_k: int | None = None
    """Likeliest tokens that are drawn from."""
    top_p: float = 1.0
    """Tokens that are drawn from have together at least this probability, the likeliest first
    (Holtzman et al., The curious case of neural text degeneration, 2020)."""
    min_p: float = 0.0
    """Least probability of a token that is drawn, as a share of the likeliest one's (Nguyen et al., 2024)."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that were there before, and multiplies negative ones (Keskar et al.,
    CTRL, 2019)."""
    seed: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0 <= self.temperature < math.inf, "at least 0")
        _check("top-k", self.top_k, self.top_k is None or self.top_k >= 1, "at least 1")
        _check("top-p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        _check("min-p", self.min_p, 0.0 <= self.min_p <= 1.0, "from 0 to 1")
        penalty = self.repetition_penalty
        _check("repetition penalty", penalty, 0.0 < penalty < math.inf, "above 0")


def _check(name: str, value: object, is_valid: bool, range_: str) -> None:
    if not is_valid:
        raise UsageError("HC596", f"{name} is {value!r}", remedy=f"give a number {range_}")


def choose(logits: np.ndarray, seen: Sequence[int], sampling: Sampling, random: np.random.Generator) -> int:
    """A token by logits [vocabulary]; `seen` are those that were there before."""
    if sampling.temperature == 0.0:
        return int(np.argmax(penalized(logits, seen, sampling.repetition_penalty)))
    tokens, probabilities = distribution(logits, seen, sampling)
    # one number of the generator for each token, whatever the options leave
    place = np.searchsorted(np.cumsum(probabilities), random.random() * probabilities.sum(), side="right")
    return int(tokens[min(int(place), len(tokens) - 1)])


def distribution(
    logits: np.ndarray, seen: Sequence[int], sampling: Sampling
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that may be drawn, the likeliest first, and their probabilities in float64.

    Requires: a temperature above 0.
    """
    scores = penalized(logits, seen, sampling.repetition_penalty) / sampling.temperature
    tokens = np.argsort(-scores, kind="stable")[: sampling.top_k]
    probabilities = np.exp(scores[tokens] - scores[tokens[0]])
    probabilities /= probabilities.sum()
    # the token with which the sum reaches top_p is the last one
    count = int(np.searchsorted(np.cumsum(probabilities), sampling.top_p)) + 1
    count = min(count, int((probabilities >= sampling.min_p * probabilities[0]).sum()))
    kept = probabilities[:count]
    return tokens[:count], kept / kept.sum()


def penalized(logits: np.ndarray, seen: Sequence[int], penalty: float) -> np.ndarray:
    """Logits in float64, those of tokens that were seen made less likely."""
    scores = logits.astype(np.float64)
    if penalty != 1.0 and len(seen):
        tokens = np.unique(np.asarray(seen, np.int64))
        old = scores[tokens]
        scores[tokens] = np.where(old > 0, old / penalty, old * penalty)
    return scores
