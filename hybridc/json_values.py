"""Values of JSON documents that anybody may have written: checked as they are read.

A reader is a function from a value to what it stands for, which raises JsonValueError, with the path of the
wrong value, for anything else.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)
_LARGEST_WHOLE = 2**63 - 1
"""The runtime counts in 64 bits."""
LARGEST_SIZE = 2**48
"""Of anything in memory, in bytes or elements. No address space of x86-64 has more, and what is computed from
it (ends, sums of a few, products with the bits of an element) stays far below 2**63."""
LARGEST_RANK = 32
"""Dimensions that every numpy can handle."""
_LONGEST_US = 1e18
SEAL = "sha256"
"""Member that holds the hash of all others."""


class JsonValueError(ValueError):
    """A value is missing or wrong; `path` is where, such as `plans[0].pins`."""

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(f"{path}: {what}" if path else what)
        self.what = what
        self.path = path


def parse(data: bytes) -> Any:
    """The value of a JSON document. Raises JsonValueError for anything else, NaN and infinity too."""
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise JsonValueError("it is nested too deeply") from None
    except ValueError as error:  # UTF-8, syntax, or a number of thousands of digits
        raise JsonValueError(str(error)) from None


def parse_elements(data: str, read: Mapping[str, Callable[[Any], Any]]) -> dict[str, tuple[Any, ...]]:
    """The members of a JSON object of lists, each element as the reader for its member reads it.

    An element is read before the next one is parsed, as the values of a whole document take several times
    the memory of what they stand for. Raises JsonValueError, with the path of the wrong value, for anything
    but such an object with these members.
    """
    try:
        text = _Text(data)
        found: dict[str, tuple[Any, ...]] = {}
        for key in text.items("{", "}"):
            text.skip(":")
            if key not in read or key in found:
                raise JsonValueError(f"{reprlib.repr(key)} is unknown, or stands there twice")
            values = enumerate(text.items("[", "]"))
            found[key] = tuple(_at(f"{key}[{i}]", read[key], value) for i, value in values)
        text.end()
    except RecursionError:
        raise JsonValueError("it is nested too deeply") from None
    except JsonValueError:
        raise
    except (TypeError, ValueError) as error:  # syntax, a key that is no string, or thousands of digits
        raise JsonValueError(str(error)) from None
    for key in read:
        if key not in found:
            raise JsonValueError("is missing", key)
    return found


class _Text:
    """A JSON document, read from its begin to its end."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0
        self._decoder = json.JSONDecoder(parse_constant=_refuse_constant)

    def items(self, first: str, last: str) -> Iterator[Any]:
        """The values between two brackets, of which each is followed by a comma or the last bracket."""
        self.skip(first)
        if self._next() == last:
            self.skip(last)
            return
        while True:
            self._next()
            value, self._place = self._decoder.raw_decode(self._text, self._place)
            yield value
            if self._next() == last:
                break
            self.skip(",")
        self.skip(last)

    def skip(self, letter: str) -> None:
        """Raises ValueError if the next one is another."""
        if self._next() != letter:
            raise ValueError(f"{letter!r} is expected at character {self._place}")
        self._place += 1

    def end(self) -> None:
        """Raises ValueError if there is more."""
        if self._next():
            raise ValueError(f"there is more behind character {self._place}")

    def _next(self) -> str:
        """The next letter that is no white space; empty at the end."""
        while (letter := self._text[self._place : self._place + 1]) and letter in " \t\n\r":
            self._place += 1
        return letter


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def sealed(data: dict[str, Any]) -> dict[str, Any]:
    """The object with a hash of all its other members, which tells when any of them was changed."""
    content = {key: value for key, value in data.items() if key != SEAL}
    digest = hashlib.sha256()
    for part in _canonical(content):
        digest.update(part.encode())
    return {**content, SEAL: digest.hexdigest()}


def _canonical(data: dict[str, Any]) -> Iterator[str]:
    """The object as compact JSON with its keys in order, in parts: the text takes several times the memory
    of what it stands for while it is made."""
    for number, key in enumerate(sorted(data)):
        yield f"{',' if number else '{'}{_compact(key)}:"
        if isinstance(data[key], list) and data[key]:
            for position, value in enumerate(data[key]):
                yield f"{',' if position else '['}{_compact(value)}"
            yield "]"
        else:
            yield _compact(data[key])
    yield "}" if data else "{}"


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def is_sealed(data: dict[str, Any]) -> bool:
    """Whether the hash of an object that was parsed is that of its other members."""
    return bool(sealed(data)[SEAL] == data.get(SEAL))


_MISSING: Any = object()


def member(data: Any, key: str, read: Callable[[Any], T], default: T = _MISSING) -> T:
    """The value of a member of an object, read by `read`; `default` where there is none."""
    if not isinstance(data, dict):
        raise JsonValueError(f"{reprlib.repr(data)} is not an object")
    if key in data:
        return _at(key, read, data[key])
    if default is _MISSING:
        raise JsonValueError("is missing", key)
    return default


def each(read: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    """Reads every element of a list."""

    def read_all(values: Any) -> tuple[T, ...]:
        if not isinstance(values, list | tuple):  # `dataclasses.asdict` leaves tuples
            raise JsonValueError(f"{reprlib.repr(values)} is not a list")
        return tuple(_at(f"[{i}]", read, value) for i, value in enumerate(values))

    return read_all


def shared(read: Callable[[Any], H]) -> Callable[[Any], H]:
    """Reads values of which equal ones become one object: those of many buckets of sizes are mostly equal."""
    known: dict[H, H] = {}

    def read_one(value: Any) -> H:
        made = read(value)
        return known.setdefault(made, made)

    return read_one


def mapping(read: Callable[[Any], T]) -> Callable[[Any], dict[str, T]]:
    """Reads every value of an object whose keys are free."""

    def read_all(values: Any) -> dict[str, T]:
        if not isinstance(values, dict):
            raise JsonValueError(f"{reprlib.repr(values)} is not an object")
        return {text(key): _at(key, read, value) for key, value in values.items()}

    return read_all


def optional(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """Reads a value that may be null."""
    return lambda value: None if value is None else read(value)


def text(value: Any) -> str:
    """Reads a string, of which equal ones are one: names of tensors and kernels stand in many places."""
    if not isinstance(value, str):
        raise JsonValueError(f"{reprlib.repr(value)} is not a string")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise JsonValueError(f"{reprlib.repr(value)} has half a character")  # which nothing can print
    return sys.intern(str(value))  # TVM's strings are of a class of their own


def flag(value: Any) -> bool:
    """Reads true or false."""
    if not isinstance(value, bool):
        raise JsonValueError(f"{reprlib.repr(value)} is not true or false")
    return value


def whole(value: Any) -> int:
    """Reads an integer of 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise JsonValueError(f"{reprlib.repr(value)} is not an integer")
    if not -_LARGEST_WHOLE <= value <= _LARGEST_WHOLE:
        raise JsonValueError(f"{reprlib.repr(value)} has more than 64 bits")
    return value


def count(value: Any) -> int:
    """Reads an integer of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise JsonValueError(f"{reprlib.repr(value)} is not a non-negative integer")
    return whole(value)


def size(value: Any) -> int:
    """Reads a number of bytes or elements, or an offset: an integer from 0 to `LARGEST_SIZE`."""
    if count(value) > LARGEST_SIZE:
        raise JsonValueError(f"{reprlib.repr(value)} is more than any memory holds")
    return int(value)


def shape(value: Any) -> tuple[int, ...]:
    """Reads the extents of a tensor that memory can hold."""
    extents = each(size)(value)
    if not is_possible_shape(extents):
        raise JsonValueError(f"{reprlib.repr(value)} is more than any memory holds")
    return extents


def is_possible_shape(extents: Sequence[int]) -> bool:
    """Whether some memory holds so many elements, and a program can count them dimension by dimension."""
    if len(extents) > LARGEST_RANK or not all(0 <= extent <= LARGEST_SIZE for extent in extents):
        return False
    return math.prod(extent for extent in extents if extent) <= LARGEST_SIZE


def microseconds(value: Any) -> float:
    """Reads a time: a number from 0 to some ten thousand years, so that sums of them are finite."""
    if not 0 <= number(value) <= _LONGEST_US:
        raise JsonValueError(f"{reprlib.repr(value)} is not a time in microseconds")
    return float(value)


def number(value: Any) -> int | float:
    """Reads a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise JsonValueError(f"{reprlib.repr(value)} is not a number")
    return value


def hexadecimal(digits: int) -> Callable[[Any], str]:
    """Reads a string of this many lower-case hexadecimal digits."""

    def read(value: Any) -> str:
        if not re.fullmatch(f"[0-9a-f]{{{digits}}}", text(value)):
            raise JsonValueError(f"{reprlib.repr(value)} is not a hexadecimal number of {digits} digits")
        return text(value)

    return read


def _at(step: str, read: Callable[[Any], T], value: Any) -> T:
    """`read(value)`, with errors that name the step to the value."""
    try:
        return read(value)
    except JsonValueError as error:
        what, rest = error.what, error.path
    except (TypeError, ValueError) as error:
        what, rest = str(error), ""
    dot = "." if rest and not rest.startswith("[") else ""
    raise JsonValueError(what, f"{step}{dot}{rest}") from None
