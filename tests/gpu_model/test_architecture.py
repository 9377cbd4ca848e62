"""Occupancy: what CUDA's occupancy calculator says of the same blocks."""

from __future__ import annotations

import pytest

from hybridc.errors import UsageError
from hybridc.gpu_model.architecture import ARCHITECTURES, architecture


@pytest.mark.parametrize(
    ("name", "registers", "shared_bytes", "threads", "blocks", "limit"),
    [
        ("sm_86", 32, 0, 256, 6, "warps"),
        ("sm_86", 255, 0, 256, 1, "registers"),
        ("sm_86", 128, 0, 128, 4, "registers"),
        ("sm_86", 32, 48 * 1024, 128, 2, "shared memory"),
        ("sm_86", 32, 0, 32, 16, "blocks"),
        ("sm_86", 33, 0, 1024, 1, "warps"),
        ("sm_75", 64, 0, 256, 4, "warps"),
        ("sm_75", 32, 32 * 1024, 64, 2, "shared memory"),
        ("sm_75", 32, 0, 32, 16, "blocks"),
        ("sm_80", 32, 0, 1024, 2, "warps"),
        ("sm_90", 168, 0, 384, 1, "registers"),
    ],
)
def test_blocks_that_fit(
    name: str, registers: int, shared_bytes: int, threads: int, blocks: int, limit: str
) -> None:
    model = architecture(name)
    assert model.occupancy(registers, shared_bytes, threads) == blocks
    assert model.limited_by(registers, shared_bytes, threads) == limit


def test_a_block_too_large_fits_nowhere() -> None:
    assert all(model.occupancy(255, 0, 1024) == 0 for model in ARCHITECTURES.values())
    assert ARCHITECTURES["sm_75"].occupancy(32, 65 * 1024, 64) == 0


def test_l1_is_what_the_next_carveout_leaves() -> None:
    assert ARCHITECTURES["sm_86"].l1_bytes(0, 4) == (128 - 8) * 1024  # CUDA takes 1 KiB a block
    assert ARCHITECTURES["sm_86"].l1_bytes(20 * 1024, 2) == (128 - 64) * 1024
    assert ARCHITECTURES["sm_75"].l1_bytes(0, 4) == (96 - 32) * 1024


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        architecture("sm_35")
    assert error.value.code == "HC543"
