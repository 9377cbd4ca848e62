"""A decoder that remembers: sequences of tokens, and the keys and values that were computed of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hybridc.errors import UsageError
from hybridc.generation.form import IDS, LAST, LOGITS, MASK, POSITIONS, DecoderForm, decoder_form
from hybridc.generation.sampling import Sampling, choose
from hybridc.generation.saved import SavedCache, read_cache, write_cache
from hybridc.ir import Device
from hybridc.runtime import Session, load
from hybridc.runtime.descriptions import DeviceMemory

Tokens = Sequence[int]


class GenerationSession:
    """Sequences of a compiled decoder, as many as it was compiled for.

        session = GenerationSession("llama.hyb")
        logits = session.append([[1, 17, 204]])            # [batch, vocabulary], behind the last tokens
        other = session.fork()                             # a copy that goes its own way
        session.rewind(2)                                  # as if only two tokens had been there
        session.save("prompt.npz")                         # for another session's `restore`

    Where the plan leaves new keys and values in the place of the old ones, on the host or on the GPU, they
    are not copied from one run to the next of as many tokens; forks and runs of other lengths copy them.
    Sessions that were forked share code, weights and memory; use them from one thread at a time.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        threads: int | None = None,
        gpu_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        trusted_keys: Sequence[str | Path] | None = None,
    ) -> None:
        session = load(
            path,
            threads=threads,
            gpu_memory_bytes=gpu_memory_bytes,
            host_memory_bytes=host_memory_bytes,
            trusted_keys=trusted_keys,
        )
        try:
            self._decoder = _Decoder(session)
        except BaseException:
            session.close()
            raise
        form = self._decoder.form
        self._sequences: list[list[int]] = [[] for _ in range(form.batch)]
        self._cache = {name: np.zeros(shape, dtype) for name, (shape, dtype) in form.places.items()}

    @property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """The tokens that are there, of each sequence."""
        return tuple(map(tuple, self._sequences))

    @property
    def context(self) -> int:
        """Tokens that a sequence may have."""
        return self._decoder.form.context

    @property
    def vocabulary(self) -> int:
        """Token ids are less."""
        return self._decoder.form.vocabulary

    @property
    def longest_run(self) -> int:
        """New tokens of each sequence that one run takes at most."""
        return max(self._decoder.form.times_us)

    def append(self, tokens: Sequence[Tokens]) -> np.ndarray:
        """Read new tokens of each sequence, which may be none; float32 logits [batch, vocabulary].

        They are those behind the last new token, and zeros of a sequence that has none. Raises UsageError:
        HC591 for an id that the vocabulary does not have, HC592 if the cache has no room, HC593 for logits
        that are not numbers. The session is then as it was before.
        """
        form, new = self._decoder.form, [list(map(int, each)) for each in tokens]
        self._check(new)
        logits = np.zeros((form.batch, form.vocabulary), np.float32)
        before = [len(sequence) for sequence in self._sequences]
        try:
            while any(new):
                size = self._next_size(max(map(len, new)))
                parts = [each[:size] for each in new]
                found = self._run(parts, size)
                for row, part in enumerate(parts):
                    if part:
                        logits[row] = found[row, 0 if form.has_last_token else len(part) - 1]
                    self._sequences[row] += part
                new = [each[size:] for each in new]
            if not np.isfinite(logits.max(axis=1)).all():
                self._clear(before)
                what = "the decoder's logits are not numbers"
                raise UsageError("HC593", what, remedy="check the weights and the precision of the model")
        except BaseException:
            self.rewind(before)
            raise
        return logits

    def rewind(self, lengths: int | Sequence[int]) -> None:
        """Keep the first tokens of each sequence: so many of all, or of each. Raises UsageError HC596."""
        kept = [lengths] * len(self._sequences) if isinstance(lengths, int) else list(lengths)
        present = [len(sequence) for sequence in self._sequences]
        if len(kept) != len(present) or any(not 0 <= n <= m for n, m in zip(kept, present, strict=True)):
            what = f"cannot rewind sequences of {present} tokens to {kept}"
            raise UsageError("HC596", what, remedy="give a length for each, at most that which it has")
        if self._decoder.form.is_appended:
            # the past ends with the last token, so what is kept moves there
            for row, (n, m) in enumerate(zip(kept, present, strict=True)):
                if n < m:
                    for array in self._cache.values():
                        array[row] = np.roll(array[row], m - n, axis=1)
        for sequence, n in zip(self._sequences, kept, strict=True):
            del sequence[n:]

    def fork(self) -> GenerationSession:
        """A session with the same sequences and a copy of the cache; the code and the weights are shared."""
        self._detach()
        other = object.__new__(GenerationSession)
        other._decoder = self._decoder
        other._sequences = [list(sequence) for sequence in self._sequences]
        other._cache = {name: array.copy() for name, array in self._cache.items()}
        return other

    def save(self, path: str | Path) -> None:
        """Write the sequences and their keys and values to a file, of which `restore` reads them.

        Raises OSError.
        """
        self._detach()
        form, longest = self._decoder.form, max(map(len, self._sequences))
        cache = {
            name: np.zeros((*array.shape[:2], longest, array.shape[3]), array.dtype)
            for name, array in self._cache.items()
        }
        for name, array in self._cache.items():
            for row, tokens in enumerate(self._sequences):
                n = len(tokens)
                first = form.context - n if form.is_appended else 0
                cache[name][row, :, :n] = array[row, :, first : first + n]
        write_cache(Path(path), SavedCache(self._decoder.model, self._sequences, cache))

    def restore(self, path: str | Path) -> None:
        """Take the sequences of a file in the place of those that are there.

        Another artifact of the same model may have written it, for another target. Raises UsageError HC582
        for a file that is damaged, or of another model or size; the session is then as it was before.
        """
        form = self._decoder.form
        saved = read_cache(Path(path), self._decoder.model, form.places)
        wrong = next((t for s in saved.sequences for t in s if t >= form.vocabulary), None)
        if wrong is not None:
            what = f"token id {wrong} of the saved cache is not in the vocabulary"
            raise UsageError("HC582", what, where=str(path), remedy="give a cache of this model")
        self._detach()
        for name, array in saved.cache.items():
            mine = np.zeros_like(self._cache[name])
            for row, tokens in enumerate(saved.sequences):
                n = len(tokens)
                first = form.context - n if form.is_appended else 0
                mine[row, :, first : first + n] = array[row, :, :n]
            self._cache[name] = mine
        self._sequences = [list(sequence) for sequence in saved.sequences]

    def generate(
        self,
        prompts: Sequence[Tokens],
        most: int,
        sampling: Sampling = Sampling(),  # noqa: B008 - it is frozen
        stop_ids: Sequence[int] = (),
        shift: int | None = None,
    ) -> Iterator[tuple[int | None, ...]]:
        """Append prompts, then give up to `most` new tokens of each sequence, one of each at a time.

        A sequence ends with one of `stop_ids`, and gives None from then on. Tokens are read when the next
        ones are asked for. Raises as `append` does; HC592 before anything is read if prompt and `most` tokens
        exceed the context. With `shift` that is allowed: of a full sequence so many first tokens stay and
        the later half of the others, which is read again, as its positions change.
        """
        new = [list(map(int, each)) for each in prompts]
        self._check(new, most - 1 if shift is None else 0)
        if shift is not None and not 0 <= shift < self.context - 1:
            what = f"{shift} tokens cannot stay of a context of {self.context}"
            raise UsageError("HC596", what, remedy=f"give a number from 0 to {self.context - 2}")
        if most < 1 or not all(new):
            raise UsageError(
                "HC596", "there is nothing to generate from", remedy="give a prompt of each sequence"
            )
        return self._generated(new, most, sampling, frozenset(stop_ids), shift)

    def _generated(
        self,
        new: list[list[int]],
        most: int,
        sampling: Sampling,
        stops: frozenset[int],
        shift: int | None,
    ) -> Iterator[tuple[int | None, ...]]:
        random = np.random.default_rng(sampling.seed)
        for _ in range(most):
            logits = self.append(new if shift is None else self._shifted(new, shift))
            chosen = [
                choose(row, sequence, sampling, random) if part else None
                for row, sequence, part in zip(logits, self._sequences, new, strict=True)
            ]
            yield tuple(chosen)
            new = [[] if token is None or token in stops else [token] for token in chosen]
            if not any(new):
                return

    def _shifted(self, new: list[list[int]], kept: int) -> list[list[int]]:
        """What is to be read of each sequence, where those without room for it were cut."""
        lengths, parts = [len(sequence) for sequence in self._sequences], list(new)
        for row, (sequence, part) in enumerate(zip(self._sequences, new, strict=True)):
            if part and len(sequence) + len(part) > self.context:
                rest = sequence[kept:]
                lengths[row], parts[row] = kept, [*rest[-(len(rest) // 2) :], *part]
        self.rewind(lengths)
        return parts

    def memory(self) -> dict[Device, DeviceMemory]:
        """Of the artifact's session, for each device; the cache of a fork is beside it."""
        return self._decoder.session.memory()

    def close(self) -> None:
        """Free everything, of forks too."""
        self._decoder.session.close()

    def __enter__(self) -> GenerationSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, new: Sequence[Tokens], more: int = 0) -> None:
        """Refuse what cannot be appended, with so many tokens behind it."""
        form = self._decoder.form
        if len(new) != form.batch:
            what = f"there are tokens of {len(new)} sequences, and the decoder has {form.batch}"
            raise UsageError("HC596", what, remedy="give a list of tokens for each sequence")
        for row, (tokens, sequence) in enumerate(zip(new, self._sequences, strict=True)):
            wrong = next((token for token in tokens if not 0 <= token < form.vocabulary), None)
            if wrong is not None:
                what = f"token id {wrong} of sequence {row} is not in the vocabulary"
                raise UsageError("HC591", what, remedy=f"ids are from 0 to {form.vocabulary - 1}")
            total = len(sequence) + len(tokens) + max(more, 0)
            if total > form.context:
                what = f"sequence {row} would have {total} tokens, and the cache has room for {form.context}"
                remedy = "shorten it, ask for fewer tokens, or compile the decoder for a longer past"
                raise UsageError("HC592", what, remedy=remedy)

    def _next_size(self, left: int) -> int:
        """New tokens of the next run: those that take the least time each, by prediction.

        Tokens behind the last one are computed in vain. They need room in the cache, and are overwritten.
        """
        form = self._decoder.form
        longest = max(map(len, self._sequences))
        fitting = [n for n in form.times_us if form.is_appended or longest + n <= form.context]
        if not fitting:
            what = f"a sequence has {longest} tokens, and no run is as short as what the cache has room for"
            remedy = "compile the decoder for one new token, too, as in --dim sequence=1,32"
            raise UsageError("HC592", what, remedy=remedy)
        return min(fitting, key=lambda n: (form.times_us[n] / min(n, left), n))

    def _run(self, parts: Sequence[Tokens], size: int) -> np.ndarray:
        """Logits [batch, size, vocabulary] of new tokens, whose keys and values are then in the cache; with
        `has_last_token` [batch, 1, vocabulary], of the last of each part."""
        form, lengths = self._decoder.form, np.array([[len(s)] for s in self._sequences])
        ids = np.zeros((form.batch, size), np.int64)
        for row, part in enumerate(parts):
            ids[row, : len(part)] = part
        feeds = {IDS: ids}
        if form.is_appended:
            places = np.arange(form.context + size) - form.context
            feeds[MASK] = (places >= -lengths).astype(np.int64)
        else:
            feeds[MASK] = (np.arange(form.context) < lengths + size).astype(np.int64)
        if form.has_last_token:
            feeds[LAST] = np.array([max(len(part), 1) - 1 for part in parts])
        if form.has_positions:
            feeds[POSITIONS] = np.minimum(lengths + np.arange(size), form.context - 1)
        logits = self._decoder.run(self, feeds, self._cache)
        if form.is_appended:
            self._cut([len(part) for part in parts])
        return logits

    def _cut(self, counts: Sequence[int]) -> None:
        """Of a past with new positions behind it the last ones that count: of each sequence so many more."""
        context = self._decoder.form.context
        self._cache = {
            name: np.stack([rows[:, n : n + context] for rows, n in zip(array, counts, strict=True)])
            for name, array in self._cache.items()
        }

    def _clear(self, lengths: Sequence[int]) -> None:
        """Put zeros behind so many positions of each sequence: hidden numbers weigh nothing, but times zero
        what is not a number stays so."""
        if self._decoder.form.is_appended:
            return  # the past ends with the last token, and nothing is behind it
        self._detach()
        for array in self._cache.values():
            for row, length in enumerate(lengths):
                array[row, :, length:] = 0

    def _detach(self) -> None:
        """Have the cache in arrays of its own."""
        self._decoder.give_up(self)


class _Decoder:
    """A loaded decoder, which several sessions may share, and whose memory one of them has its cache in."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.form: DecoderForm = decoder_form(session)
        self.model = session.artifact.manifest.source.sha256
        self._holder: GenerationSession | None = None
        self._held_size = 0
        self._placed: dict[str, np.ndarray] = {}
        """What is in places of the plan in the host's memory."""
        self._on_gpu: frozenset[str] = frozenset()
        """What is in places of the plan on the GPU."""

    def run(
        self, owner: GenerationSession, feeds: dict[str, np.ndarray], cache: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Logits; the new cache is the owner's, in its arrays or in the places of the plan."""
        size = feeds[IDS].shape[1]
        is_kept = self._holder is owner and self._held_size == size
        if self._holder is not None and not is_kept:
            self.give_up(self._holder)
        if is_kept:
            placed, on_gpu = self._placed, self._on_gpu
        else:
            placed, on_gpu = self._places({**feeds, **cache})
        stays = {*placed, *on_gpu}
        kept = stays if is_kept else set()
        fed = {**feeds, **{name: array for name, array in cache.items() if name not in kept}}
        others = [name for name in self.form.caches if name not in stays]
        wanted = [LOGITS, *(self.form.caches[name] for name in others)]
        logits, *arrays = self.session.run(wanted, fed, kept=kept)
        cache.update(zip(others, arrays, strict=True))
        if stays:
            self._holder, self._held_size = owner, size
            self._placed, self._on_gpu = placed, on_gpu
        return logits

    def give_up(self, owner: GenerationSession) -> None:
        """Copy what is in the places of the plan to the arrays of the session that has it there."""
        if self._holder is owner:
            for name, array in self._placed.items():
                owner._cache[name] = array.copy()
            for name in self._on_gpu:
                owner._cache[name] = self.session.resident(name)
            self._holder, self._placed, self._on_gpu = None, {}, frozenset()

    def _places(self, feeds: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], frozenset[str]]:
        """Where the plan for these sizes reads the past and leaves the present, on the host; and which are
        on the GPU."""
        if self.form.is_appended:
            return {}, frozenset()
        caches = self.form.caches
        return self.session.places(caches, feeds), self.session.residents(caches, feeds)
