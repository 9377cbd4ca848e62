"""Parameters that a compiled step holds in several parts; the user sees them whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SplitParameter:
    """A parameter, or optimizer state of one, that was split into several along `axis`."""

    axis: int
    parts: tuple[str, ...]
    """Names, in order."""
    ends: tuple[int, ...]
    """Index along `axis` after the last of each part."""

    def cut(self, whole: np.ndarray) -> dict[str, np.ndarray]:
        """The parts of an array, contiguous."""
        arrays = np.split(whole, self.ends[:-1], self.axis)
        return {name: np.ascontiguousarray(part) for name, part in zip(self.parts, arrays, strict=True)}

    def joined(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """The whole array of its parts by name."""
        return np.concatenate([parts[name] for name in self.parts], self.axis)


Splits = Mapping[str, SplitParameter]
"""By the name of the whole."""


def cut(values: Mapping[str, np.ndarray], splits: Splits) -> dict[str, np.ndarray]:
    """Values as the step has them: the parts of those that are split, the others whole."""
    parts: dict[str, np.ndarray] = {}
    for name, value in values.items():
        parts |= splits[name].cut(value) if name in splits else {name: value}
    return parts


def joined(values: Mapping[str, np.ndarray], splits: Splits) -> dict[str, np.ndarray]:
    """Copies of values as the user has them, each where its first part was."""
    wholes = whole_names(splits)
    result: dict[str, np.ndarray] = {}
    for name, value in values.items():
        whole = wholes.get(name, name)
        if whole not in result:
            result[whole] = splits[whole].joined(values) if name in wholes else value.copy()
    return result


def whole_names(splits: Splits) -> dict[str, str]:
    """Names of whole parameters by the names of their parts."""
    return {part: name for name, split in splits.items() for part in split.parts}
