"""Asynchronous copies on the emulated GPU: data comes with the wait for it, and no sooner."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridc.codegen.cuda import compile_cubin
from tests.support.gpu_program import Program, allocate, download, upload

pytestmark = pytest.mark.usefixtures("device")

COPY = """
#include <hybridc/async_copy.h>
extern "C" __global__ void copies(float* from, float* out) {
  __shared__ alignas(16) float groups[3][128];
  const int at = threadIdx.x * 4;
  for (int i = 0; i < 4; ++i) groups[0][at + i] = groups[1][at + i] = groups[2][at + i] = 1.0f;
  for (int group = 0; group < 3; ++group) {
    COPIES
    commit_copies();
  }
  WAIT
  for (int group = 0; group < 3; ++group)
    for (int i = 0; i < 4; ++i) out[group * 128 + at + i] = groups[group][at + i];
}
"""
WIDTHS = {
    4: "for (int i = 0; i < 4; ++i) copy_async_4(&groups[group][at + i], from + group * 128 + at + i);",
    8: "for (int i = 0; i < 4; i += 2) copy_async_8(&groups[group][at + i], from + group * 128 + at + i);",
    16: "copy_async_16(&groups[group][at], from + group * 128 + at);",
}
FEW = ((4, 0), (8, 2), (16, 1))
"""Widths, and groups that may be on their way, of the fast suite."""
DATA = np.arange(384, dtype=np.float32)


def copied(text: str, blocks: int = 1) -> NDArray[np.float32]:
    out = allocate(384 * 4)
    Program(text).launch("copies", [upload(DATA), out], grid=blocks)
    assert int(ctypes.CDLL("libcudart.so.13").cudaDeviceSynchronize()) == 0
    return download(out, 384).view(np.float32)


@pytest.mark.parametrize(
    ("width", "remaining"),
    [
        pytest.param(width, remaining, marks=[] if (width, remaining) in FEW else pytest.mark.slow)
        for width in WIDTHS
        for remaining in range(4)
    ],
)
def test_groups_arrive_with_the_wait_for_them(width: int, remaining: int) -> None:
    text = COPY.replace("COPIES", WIDTHS[width]).replace("WAIT", f"await_copies({remaining});")
    found = copied(text).reshape(3, 128)
    arrived = 3 - remaining
    np.testing.assert_array_equal(found[:arrived].reshape(-1), DATA[: arrived * 128])
    assert np.isnan(found[arrived:]).all()


def test_what_is_not_committed_is_not_waited_for() -> None:
    text = COPY.replace("COPIES", WIDTHS[16]).replace("WAIT", "await_copies(0);")
    assert np.isnan(copied(text.replace("commit_copies();", ""))).all()


def test_zeros_where_nothing_exists() -> None:
    copies = (
        "copy_async_16_if(&groups[group][at], group == 1 ? nullptr : from + group * 128 + at, group != 1);"
    )
    found = copied(COPY.replace("COPIES", copies).replace("WAIT", "await_copies(0);")).reshape(3, 128)
    np.testing.assert_array_equal(found, np.where([[True], [False], [True]], DATA.reshape(3, 128), 0))


def test_copies_of_a_block_that_ended_are_forgotten() -> None:
    found = copied(COPY.replace("COPIES", WIDTHS[16]).replace("WAIT", "await_copies(2);"), blocks=64)
    assert np.isnan(found[128:]).all()


def test_addresses_have_to_be_aligned() -> None:
    copies = WIDTHS[16].replace("from + ", "from + 1 + ")
    with pytest.raises(AssertionError):
        copied(COPY.replace("COPIES", copies).replace("WAIT", "await_copies(0);"))


@pytest.mark.parametrize(
    "architecture", ["sm_80", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_86", "sm_90"))]
)
def test_nvidias_compiler_takes_the_same_functions(architecture: str) -> None:
    for copies in (
        *WIDTHS.values(),
        WIDTHS[4].replace("copy_async_4(", "copy_async_4_if(").replace(");", ", at > 8);"),
    ):
        compile_cubin(COPY.replace("COPIES", copies).replace("WAIT", "await_copies(1);"), architecture)
