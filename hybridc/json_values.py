"""Values of JSON documents that may hold anything: checked as they are read, with the path of a wrong one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class JsonValueError(ValueError):
    """A value is missing or wrong; `path` is where, such as `plans[0].pins`."""

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(f"{path}: {what}" if path else what)
        self.what = what
        self.path = path


def member(data: Any, key: str, read: Callable[[Any], T]) -> T:
    """The value of a member of an object, read by `read`."""
    if not isinstance(data, dict):
        raise JsonValueError(f"{data!r} is not an object")
    if key not in data:
        raise JsonValueError("is missing", key)
    return _at(key, read, data[key])


def each(read: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    """Reads every element of a list."""

    def read_all(values: Any) -> tuple[T, ...]:
        if not isinstance(values, list | tuple):  # `dataclasses.asdict` leaves tuples
            raise JsonValueError(f"{values!r} is not a list")
        return tuple(_at(f"[{i}]", read, value) for i, value in enumerate(values))

    return read_all


def mapping(read: Callable[[Any], T]) -> Callable[[Any], dict[str, T]]:
    """Reads every value of an object whose keys are free."""

    def read_all(values: Any) -> dict[str, T]:
        if not isinstance(values, dict):
            raise JsonValueError(f"{values!r} is not an object")
        return {text(key): _at(key, read, value) for key, value in values.items()}

    return read_all


def optional(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """Reads a value that may be null."""
    return lambda value: None if value is None else read(value)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise JsonValueError(f"{value!r} is not a string")
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise JsonValueError(f"{value!r} is not true or false")
    return value


def count(value: Any) -> int:
    """A whole number of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise JsonValueError(f"{value!r} is not a non-negative integer")
    return value


def number(value: Any) -> int | float:
    """A finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise JsonValueError(f"{value!r} is not a number")
    return value


def hexadecimal(digits: int) -> Callable[[Any], str]:
    """Reads a string of this many lower-case hexadecimal digits."""

    def read(value: Any) -> str:
        if not re.fullmatch(f"[0-9a-f]{{{digits}}}", text(value)):
            raise JsonValueError(f"{value!r} is not a hexadecimal number of {digits} digits")
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
