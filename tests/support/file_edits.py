"""Ways to damage a file: flipped bytes, and edits of JSON data that stay JSON."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

from tests.support.mutations import HOSTILE_VALUES, places, with_value

HUGE = (2**31, 2**47, 2**48 + 1, 2**61, 2**62, 2**63 - 1, 10**400)


def damaged(data: bytes, random: Random) -> bytes:
    """With a bit or a byte changed, bytes cut off or put in, or two places exchanged."""
    changed, place = bytearray(data), random.randrange(len(data))
    kind = random.randrange(6)
    if kind == 0:
        changed[place] ^= 1 << random.randrange(8)
    elif kind == 1:
        changed[place] = random.randrange(256)
    elif kind == 2:
        del changed[place:]
    elif kind == 3:
        del changed[place : place + random.randint(1, 16)]
    elif kind == 4:
        changed[place:place] = random.randbytes(random.randint(1, 16))
    else:
        other = random.randrange(len(data))
        changed[place], changed[other] = changed[other], changed[place]
    return bytes(changed)


def edited(data: Any, random: Random) -> Any:
    """With one to three values, or lists of them, changed to others that look alike or are far off."""
    for _ in range(random.choice((1, 1, 2, 3))):
        data = random.choice((_with_number, _with_number, _with_exchanged, _with_other_list, _with_hostile))(
            data, random
        )
    return data


def value_at(data: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        data = data[key]
    return data


def _with_number(data: Any, random: Random) -> Any:
    numbers = [p for p in places(data) if type(value_at(data, p)) is int]
    if not numbers:
        return data
    place = random.choice(numbers)
    old, other = value_at(data, place), value_at(data, random.choice(numbers))
    near = (old - 1, old + 1, old - 512, old + 512, old + 64, old - 64, old * 2, old // 2)
    return with_value(data, place, random.choice((*near, 0, -1, -old, other, random.choice(HUGE))))


def _with_exchanged(data: Any, random: Random) -> Any:
    """Two values of one type, or of one key."""
    leaves = [p for p in places(data) if not isinstance(value_at(data, p), dict | list)]
    if not leaves:
        return data
    one = random.choice(leaves)
    kind = type(value_at(data, one))
    alike = [p for p in leaves if type(value_at(data, p)) is kind]
    same_key = [p for p in alike if p[-1] == one[-1]]
    other = random.choice(random.choice((alike, same_key)))
    first, second = value_at(data, one), value_at(data, other)
    return with_value(with_value(data, one, second), other, first)


def _with_other_list(data: Any, random: Random) -> Any:
    """An element of a list dropped or doubled, or all in another order."""
    lists = [p for p in places(data) if isinstance(value_at(data, p), list) and value_at(data, p)]
    if not lists:
        return data
    place = random.choice(lists)
    values = copy.deepcopy(value_at(data, place))
    index, kind = random.randrange(len(values)), random.randrange(3)
    if kind == 0:
        del values[index]
    elif kind == 1:
        values.insert(random.randrange(len(values) + 1), copy.deepcopy(values[index]))
    else:
        random.shuffle(values)
    return with_value(data, place, values)


def _with_hostile(data: Any, random: Random) -> Any:
    return with_value(data, random.choice(list(places(data))), random.choice(HOSTILE_VALUES))
