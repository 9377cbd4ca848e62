"""Matrix instructions on the emulated GPU: fragments lie as the PTX ISA says, and products are numpy's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridc.codegen.cuda import compile_cubin
from tests.support.gpu_program import Program, allocate, download, upload

pytestmark = pytest.mark.usefixtures("device")

PRODUCT = """
#include <hybridc/mma.h>
extern "C" __global__ void product(unsigned* a, unsigned* b, TYPE* c, TYPE* out) {
  TYPE sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = c[threadIdx.x * 4 + i];
  INSTRUCTION(sums, a + threadIdx.x * A_REGISTERS, b + threadIdx.x * B_REGISTERS);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = sums[i];
}
"""
LOADS = """
#include <hybridc/mma.h>
extern "C" __global__ void loads(unsigned short* matrices, unsigned* out) {
  __shared__ alignas(16) unsigned short rows[32 * 8];
  for (int i = 0; i < 8; ++i) rows[threadIdx.x * 8 + i] = matrices[threadIdx.x * 8 + i];
  __syncthreads();
  unsigned registers[4] = {7, 7, 7, 7};
  INSTRUCTION(registers, rows + threadIdx.x % (8 * COUNT) * 8 + OFFSET);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = registers[i];
}
"""
SHORT = {"int8": "s8", "uint8": "u8"}
Bits = NDArray[np.uint32]


def registers(matrix: NDArray[np.generic], places: Callable[[int, int, int], tuple[int, int]]) -> Bits:
    """Lanes' registers, of which each holds 4 bytes of elements: element e of register r of lane l is where
    `places(l, r, e)` says."""
    per_register = 4 // matrix.dtype.itemsize
    count = matrix.size // (32 * per_register)
    packed = [
        [[matrix[places(lane, r, e)] for e in range(per_register)] for r in range(count)]
        for lane in range(32)
    ]
    return np.array(packed, matrix.dtype).view(np.uint32).reshape(32, count)


def product(
    instruction: str, a: NDArray[np.generic], b: NDArray[np.generic], c: NDArray[np.generic]
) -> NDArray[Any]:
    """16x8 results, by the layouts of PTX ISA 9.7.14.5."""
    n = 4 // a.dtype.itemsize
    a_bits = registers(a, lambda lane, r, e: (lane // 4 + r % 2 * 8, r // 2 * 4 * n + lane % 4 * n + e))
    b_bits = registers(b, lambda lane, r, e: (r * 4 * n + lane % 4 * n + e, lane // 4))
    where = np.array(
        [[(lane // 4 + i // 2 * 8) * 8 + lane % 4 * 2 + i % 2 for i in range(4)] for lane in range(32)]
    )
    text = PRODUCT.replace("INSTRUCTION", instruction).replace(
        "TYPE", "int" if c.dtype == np.int32 else "float"
    )
    text = text.replace("A_REGISTERS", str(a_bits.shape[1])).replace("B_REGISTERS", str(b_bits.shape[1]))
    out = allocate(16 * 8 * 4)
    arguments = [upload(a_bits), upload(b_bits), upload(c.reshape(-1)[where]), out]
    assert Program(text).launch("product", arguments) == 0
    result = np.empty(128, c.dtype)
    result[where.reshape(-1)] = download(out, 128).view(c.dtype)
    return result.reshape(16, 8)


def drawn(shape: tuple[int, int], seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("depth", [pytest.param(8, marks=pytest.mark.slow), 16])
def test_half_products(depth: int) -> None:
    a, b = (drawn(shape, depth).astype(np.float16) for shape in ((16, depth), (depth, 8)))
    c = drawn((16, 8), 2)
    found = product(f"mma_m16n8k{depth}_f16", a, b, c)
    np.testing.assert_allclose(found, c + a.astype(float) @ b.astype(float), rtol=0, atol=1e-5)


def test_bfloat_products() -> None:
    a, b = ((drawn(s, 3).view(np.uint32) >> 16).astype(np.uint16) for s in ((16, 16), (16, 8)))
    wide = [(x.astype(np.uint32) << 16).view(np.float32).astype(float) for x in (a, b)]
    c = drawn((16, 8), 2)
    found = product("mma_m16n8k16_bf16", a, b, c)
    np.testing.assert_allclose(found, c + wide[0] @ wide[1], rtol=0, atol=1e-5)


def test_tf32_ignores_the_last_bits() -> None:
    a, b, c = drawn((16, 8), 4), drawn((8, 8), 5), drawn((16, 8), 6)
    wide = [(x.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(float) for x in (a, b)]
    found = product("mma_m16n8k8_tf32", a, b, c)
    np.testing.assert_allclose(found, c + wide[0] @ wide[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("right", ["int8", pytest.param("uint8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("left", [pytest.param("int8", marks=pytest.mark.slow), "uint8"])
def test_integer_products_are_exact(left: str, right: str) -> None:
    rng = np.random.default_rng(7)
    a = rng.integers(0, 256, (16, 32)).astype(np.uint8).view(left)
    b = rng.integers(0, 256, (32, 8)).astype(np.uint8).view(right)
    c = rng.integers(-1000, 1000, (16, 8)).astype(np.int32)
    c[0], c[1] = np.iinfo(np.int32).max, np.iinfo(np.int32).min  # some of these sums wrap around
    found = product(f"mma_m16n8k32_{SHORT[left]}_{SHORT[right]}", a, b, c)
    np.testing.assert_array_equal(found, c + a.astype(np.int32) @ b.astype(np.int32))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 4])
def test_matrix_loads(count: int, transposed: bool) -> None:
    matrices = np.arange(32 * 8, dtype=np.uint16).reshape(4, 8, 8)
    found = loaded(matrices, count, transposed)
    taken = matrices.transpose(0, 2, 1) if transposed else matrices
    # lane 4 i + j holds elements 2 j and 2 j + 1 of row i
    expected = np.ascontiguousarray(taken[:count]).reshape(count, 32, 2).view(np.uint32).reshape(count, 32).T
    np.testing.assert_array_equal(found[:, :count], expected)
    assert (found[:, count:] == 7).all()


def test_rows_have_to_be_aligned() -> None:
    with pytest.raises(AssertionError):
        loaded(np.zeros((4, 8, 8), np.uint16), 4, False, offset=4)


def loaded(matrices: NDArray[np.uint16], count: int, transposed: bool, offset: int = 0) -> Bits:
    text = LOADS.replace("INSTRUCTION", f"ldmatrix_x{count}{'_trans' * transposed}")
    out = allocate(128 * 4)
    launch = Program(text.replace("COUNT", str(count)).replace("OFFSET", str(offset)))
    launch.launch("loads", [upload(matrices), out])
    assert _synchronized() == 0
    return download(out, 128).view(np.uint32).reshape(32, 4)


def _synchronized() -> int:
    return int(ctypes.CDLL("libcudart.so.13").cudaDeviceSynchronize())


@pytest.mark.parametrize(
    "architecture",
    ["sm_75", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_80", "sm_86", "sm_90"))],
)
def test_nvidias_compiler_takes_the_same_functions(architecture: str) -> None:
    names = [("mma_m16n8k8_f16", "float"), ("mma_m16n8k16_f16", "float")]
    names += [(f"mma_m16n8k32_{a}_{b}", "int") for a in SHORT.values() for b in SHORT.values()]
    if architecture != "sm_75":
        names += [("mma_m16n8k16_bf16", "float"), ("mma_m16n8k8_tf32", "float")]
    for name, kind in names:
        text = PRODUCT.replace("INSTRUCTION", name).replace("TYPE", kind)
        compile_cubin(text.replace("A_REGISTERS", "4").replace("B_REGISTERS", "2"), architecture)
    for count in (1, 2, 4):
        for suffix in ("", "_trans"):
            text = LOADS.replace("INSTRUCTION", f"ldmatrix_x{count}{suffix}").replace("COUNT", str(count))
            compile_cubin(text.replace("OFFSET", "0"), architecture)
