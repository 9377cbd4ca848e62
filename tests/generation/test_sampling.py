"""Distributions against those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hybridc.errors import UsageError
from hybridc.generation.sampling import Sampling, choose, distribution

SEEN = [3, 3, 10, 41]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 5},
        {"top_p": 0.4},
        {"top_p": 0.001},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5},
        {"temperature": 1.7, "top_k": 30, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 0.8},
    ],
)
def test_distribution_is_that_of_transformers(options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    sampling = Sampling(**{"temperature": 1.0, **options})
    logits = np.random.default_rng(4).normal(0, 3, 60).astype(np.float32)
    steps = [
        logits_process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        logits_process.TemperatureLogitsWarper(sampling.temperature),
        logits_process.TopKLogitsWarper(sampling.top_k or 60),
        logits_process.TopPLogitsWarper(sampling.top_p),
        logits_process.MinPLogitsWarper(sampling.min_p),
    ]
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    for step in steps:
        scores = step(torch.tensor([SEEN]), scores)
    wanted = torch.softmax(scores, -1)[0].numpy()
    tokens, probabilities = distribution(logits, SEEN, sampling)
    found = np.zeros(60)
    found[tokens] = probabilities
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


def test_draws_have_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    random, sampling = np.random.default_rng(0), Sampling(temperature=1.0)
    drawn = np.bincount([choose(logits, [], sampling, random) for _ in range(4000)], minlength=3) / 4000
    np.testing.assert_allclose(drawn, [0.5, 0.3, 0.2], atol=0.03)


def test_without_a_temperature_the_likeliest_token_is_taken() -> None:
    logits, random = np.array([0.0, 2.0, 2.0, 1.9], np.float32), np.random.default_rng(0)
    assert choose(logits, [], Sampling(), random) == 1
    assert choose(logits, [1], Sampling(repetition_penalty=1.1), random) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        Sampling(**options)
    assert caught.value.code == "HC596"
