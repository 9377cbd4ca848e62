"""Inputs of a run: read from files, or drawn at random from a seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hybridc.cli.support.arguments import check_sizes
from hybridc.cli.support.files import read_array
from hybridc.cli.support.suggest import did_you_mean
from hybridc.errors import UsageError
from hybridc.ir.graph import stored_dtype
from hybridc.options import Size

if TYPE_CHECKING:
    from hybridc.runtime.descriptions import NodeArg

_MASK, _PAST, _LAST = "attention_mask", "past_key_values.", "last_token"
_DTYPE_OF_TYPE = {"float": "float32", "double": "float64"}


class ModelInput(Protocol):
    """An input as onnxruntime describes it."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> Iterable[int]: ...

    @property
    def type(self) -> str:
        """Such as `tensor(float)`."""
        ...


def of_sizes(inputs: Iterable[NodeArg], given: Iterable[tuple[str, Size]]) -> list[NodeArg]:
    """The inputs with these sizes of open dimensions. Raises UsageError HC512 for an unknown dimension."""
    inputs, sizes = list(inputs), dict(given)
    if not sizes:
        return inputs
    check_sizes(sorted({name for each in inputs for name in each.open.values()}), sizes)
    fixed = {name: size for name, size in sizes.items() if isinstance(size, int)}
    return [
        replace(each, shape=[fixed.get(each.open.get(i, ""), n) for i, n in enumerate(each.shape)])
        for each in inputs
    ]


def gather_feeds(
    inputs: Iterable[ModelInput], files: Iterable[tuple[str, Path]], seed: int | None
) -> dict[str, np.ndarray]:
    """A feed for every input: from its file, else drawn from `seed`.

    Raises UsageError HC533 for a file of an unknown input, for two files of one input, and for an input
    without a file or seed.
    """
    inputs = list(inputs)
    names = [i.name for i in inputs]
    drawn = random_feeds(inputs, seed) if seed is not None else {}
    given: dict[str, np.ndarray] = {}
    for name, path in files:
        if name not in names:
            raise UsageError(
                "HC533", f"the model has no input {name!r}", remedy=did_you_mean(name, names, "inputs are")
            )
        if name in given:
            raise UsageError("HC533", f"--input specifies {name!r} more than once", remedy="specify it once")
        given[name] = read_array(path)
    missing = [name for name in names if name not in drawn and name not in given]
    if missing:
        raise UsageError(
            "HC533",
            f"no value for {', '.join(map(repr, missing))}",
            remedy=f"give --input {missing[0]}=FILE.npy, or --random",
        )
    return drawn | given


def random_feeds(inputs: Iterable[ModelInput], seed: int) -> dict[str, np.ndarray]:
    """Feeds that depend on the seed and on the inputs' order, shapes and types alone.

    Floats are drawn from the normal distribution, 8-bit integers from all there are, wider integers
    from 0 and 1: they are indices, masks or lengths, which these always are in range for. The mask of a
    decoder is of ones: it counts positions, and a full cache is what a run can have of any number of tokens.
    Its `last_token` is the first one, which every run has.
    """
    inputs, generator = list(inputs), np.random.default_rng(seed)
    feeds = {i.name: _draw(generator, tuple(i.shape), numpy_dtype(i.type)) for i in inputs}
    if _MASK in feeds and any(name.startswith(_PAST) for name in feeds):
        feeds[_MASK] = np.ones_like(feeds[_MASK])
        if _LAST in feeds:
            feeds[_LAST] = np.zeros_like(feeds[_LAST])
    return feeds


def _draw(generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        low, high = (limits.min, limits.max) if dtype.itemsize == 1 else (0, 1)
        return generator.integers(low, high, shape, dtype=dtype, endpoint=True)
    return generator.standard_normal(shape, dtype=np.float32).astype(dtype)


def numpy_dtype(onnx_type: str) -> np.dtype:
    """The dtype of `tensor(float)`, `tensor(int64)` and so on. Raises UsageError HC533 for other types."""
    name = onnx_type.removeprefix("tensor(").removesuffix(")")
    try:
        if name == "bfloat16" or stored_dtype(name) != name:
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, name))
        return np.dtype(_DTYPE_OF_TYPE.get(name, name))
    except TypeError:
        what = f"unsupported input type {onnx_type}"
        raise UsageError("HC533", what, remedy="give --input NAME=FILE.npy for every input") from None
