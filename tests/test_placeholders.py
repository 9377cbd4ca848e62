"""Arrays without values and their views are known as such; others that repeat one number are not."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from hybridc.placeholders import is_placeholder, placeholder


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int64", "bool", "complex128", ml_dtypes.int4])
def test_placeholders_and_their_views_take_no_memory(dtype: str) -> None:
    tracemalloc.start()
    array = placeholder((1 << 20, 1 << 20), dtype)
    views = [array, array.T, array[5:, 3:], array.reshape(1 << 10, -1, 1 << 9), np.asarray(array)]
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert all(map(is_placeholder, views))
    assert array.dtype == dtype and array.nbytes == array.itemsize << 40


def test_other_arrays_are_none() -> None:
    array = placeholder((2, 3), np.float32)
    for other in (array.copy(), np.zeros((2, 3)), np.broadcast_to(np.zeros(()), (2, 3))):
        assert not is_placeholder(other)


def test_nothing_can_be_written_to_a_placeholder() -> None:
    with pytest.raises(ValueError, match="read-only"):
        placeholder((2,), np.float32)[0] = 1
