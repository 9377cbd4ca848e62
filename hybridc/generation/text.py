"""Text from tokens as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens into text piece by piece.

    A character of several tokens is held back until it is complete, and what may become a stop string until
    it is clear. `decode` gives the text of tokens; tokens before the last piece are decoded with it, since
    tokenizers write a token differently at the beginning.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stop for stop in stops if stop)
        self._tokens: list[int] = []
        self._start = self._read = 0
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """What can be shown now. Nothing behind a stop string, nor the string itself."""
        if self.is_stopped:
            return ""
        self._tokens.append(token)
        before, now = (self._decode(self._tokens[self._start : end]) for end in (self._read, None))
        if now.endswith(_INCOMPLETE):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return self._shown(self._held + now[len(before) :])

    def finish(self) -> str:
        """What was held back, when no token follows."""
        if self.is_stopped:
            return ""
        before, now = (self._decode(self._tokens[self._start : end]) for end in (self._read, None))
        self._start = self._read = len(self._tokens)
        shown = self._shown(self._held + now[len(before) :])
        held, self._held = self._held, ""
        return shown + held

    def _shown(self, text: str) -> str:
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        longest = max(map(len, self._stops), default=1) - 1
        begun = range(min(longest, len(text)), 0, -1)
        held = next((n for n in begun if any(s.startswith(text[-n:]) for s in self._stops)), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
