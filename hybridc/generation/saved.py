"""A file with the sequences of a session, and the keys and values that were computed of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridc.array_files import open_arrays, write_arrays
from hybridc.errors import UsageError
from hybridc.json_values import count, each, member, text

_FORMAT = "hybridc-cache-1"
_BITS = np.dtype(np.uint16)
"""As what a file has 16-bit floats of which numpy has no type: bfloat16."""


@dataclass(frozen=True, slots=True)
class SavedCache:
    """What a session remembers."""

    model: str
    """SHA-256 of the ONNX model that the decoder was compiled from: numbers of another mean nothing."""
    sequences: Sequence[Sequence[int]]
    cache: Mapping[str, np.ndarray]
    """By the decoder's inputs; [batch, heads, positions, depth] of as many positions as the longest sequence
    has tokens, where those of a shorter one come first."""


def write_cache(path: Path, saved: SavedCache) -> None:
    """Replace the file. Raises OSError."""
    header = {
        "format": _FORMAT,
        "model": saved.model,
        "sequences": [list(sequence) for sequence in saved.sequences],
        "caches": list(saved.cache),
    }
    write_arrays(path, header, {f"c{i}": _in_file(array) for i, array in enumerate(saved.cache.values())})


def _in_file(array: np.ndarray) -> np.ndarray:
    return array.view(_type_in_file(array.dtype))


def _type_in_file(dtype: np.dtype) -> np.dtype:
    return _BITS if dtype.name == "bfloat16" else dtype


def read_cache(path: Path, model: str, places: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> SavedCache:
    """A file of a decoder of this model, whose caches have these shapes and types.

    The positions that are there may be fewer, and are at most as many. Raises UsageError HC582 for a file
    that is damaged, or of another decoder.
    """
    try:
        with open_arrays(path) as stored:
            if member(stored.header, "format", text) != _FORMAT:
                raise ValueError(f"format {stored.header['format']!r}")
            found = member(stored.header, "model", text)
            sequences = member(stored.header, "sequences", each(each(count)))
            names = member(stored.header, "caches", each(text))
            cache = {name: stored.array(f"c{i}") for i, name in enumerate(names)}
    except Exception as error:  # zipfile and numpy tell what they cannot read by a dozen of them
        raise _refused(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if found != model:
        raise _refused(path, "is of another model")
    length = max(map(len, sequences), default=0)
    for name, (shape, dtype) in places.items():
        batch, heads, most, depth = shape
        array = cache.get(name)
        fits = array is not None and array.shape == (batch, heads, length, depth)
        has_type = array is not None and array.dtype == _type_in_file(dtype)
        if len(sequences) != batch or length > most or not fits or not has_type:
            raise _refused(path, f"does not fit {name!r}, {dtype} {list(shape)}")
        assert array is not None
        cache[name] = array.view(dtype)
        if not np.isfinite(cache[name]).all():
            raise _refused(path, f"has values of {name!r} that are not numbers")
    return SavedCache(found, sequences, {name: cache[name] for name in places})


def _refused(path: Path, what: str) -> UsageError:
    remedy = "remove it, and have the prompt read again"
    return UsageError("HC582", f"the saved cache {what}", where=str(path), remedy=remedy)
