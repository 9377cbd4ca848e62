"""Text that comes piece by piece is what all tokens decode to, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridc.generation.text import TextStream


def by_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


@settings(max_examples=200, deadline=None)
@given(st.text("aböü😀 ", max_size=20), st.lists(st.text("abö😀 ", min_size=1, max_size=3), max_size=3))
def test_pieces_are_the_text_before_the_first_stop(text: str, stops: list[str]) -> None:
    stream, shown = TextStream(by_bytes, stops), ""
    for token in text.encode():
        shown += stream.push(token)
        assert "\N{REPLACEMENT CHARACTER}" not in shown
    shown += stream.finish()
    # a stop is seen as soon as it is complete, though a longer one may begin before it
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert shown == text and not stream.is_stopped
    else:
        assert stream.is_stopped and text.startswith(shown)
        assert len(shown) in {text[: min(ends)].find(stop) for stop in stops}


def test_words_of_a_tokenizer_keep_their_spaces() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, **{f"w{i}": i for i in range(1, 20)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    ids = [3, 1, 4, 1, 5]
    stream = TextStream(lambda each: tokenizer.decode(list(each)))
    assert "".join([*map(stream.push, ids), stream.finish()]) == tokenizer.decode(ids) == "w3 w1 w4 w1 w5"
