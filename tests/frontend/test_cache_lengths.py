"""Which dimensions of a decoder its context decides."""

from __future__ import annotations

from typing import Any

import pytest

from hybridc import models
from hybridc.errors import UsageError
from hybridc.frontend.inputs.cache_lengths import context_sizes
from hybridc.sizes import sizes_of
from tests.support.decoders import appending, llama, with_open_lengths

IN_PLACES = {"past_sequence_length": 64, "total_sequence_length": 64}


@pytest.mark.parametrize(
    ("build", "given", "expected"),
    [
        (with_open_lengths, {}, {"sequence": 1, **IN_PLACES}),
        (with_open_lengths, {"sequence": 8}, IN_PLACES),
        (appending, {}, {"n": 1, "past": 64, "total": 65}),
        (appending, {"n": 8}, {"past": 64, "total": 72}),
    ],
)
def test_sizes_are_those_with_which_a_decoder_is_compiled(
    build: Any, given: dict[str, int], expected: dict[str, int]
) -> None:
    assert context_sizes(build(), given)(64) == expected


def test_number_of_new_tokens_must_be_one() -> None:
    sizes = sizes_of([1, 8])
    assert sizes is not None
    with pytest.raises(UsageError) as caught:
        context_sizes(with_open_lengths(), {"sequence": sizes})
    assert caught.value.code == "HC512"


@pytest.mark.parametrize("build", [llama, lambda: models.build("mlp", inputs=4, hidden=8)])
def test_other_networks_are_refused(build: Any) -> None:
    with pytest.raises(UsageError) as caught:
        context_sizes(build(), {})
    assert caught.value.code == "HC539" and caught.value.remedy
