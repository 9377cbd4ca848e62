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
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
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


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def sealed(data: dict[str, Any]) -> dict[str, Any]:
    """The object with a hash of all its other members, which tells when any of them was changed."""
    content = {key: value for key, value in data.items() if key != SEAL}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return {**content, SEAL: hashlib.sha256(canonical).hexdigest()}


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
