"""What small kernels access: known sectors, bank conflicts and turns of loops."""

from __future__ import annotations

import numpy as np
import pytest

from hybridc.gpu_model.architecture import ARCHITECTURES
from hybridc.gpu_model.counters import Counters, count
from hybridc.gpu_model.kernel import Argument, Buffer, Call, Kernel, call
from hybridc.gpu_model.sass.interpreter import Interpreter
from hybridc.gpu_model.trace import Trace, main_loop, trace_blocks

SIZE = 1 << 24
TILES = 64
N = 32 * TILES


def launched(kernels: dict[str, Kernel], name: str, blocks: int = 4, *more: Argument) -> Call:
    return call(kernels[name], (blocks, 1, 1), (256, 1, 1), [Buffer(SIZE), Buffer(SIZE), *more])


def product(kernels: dict[str, Kernel]) -> Call:
    matrices = [Buffer(4 * N * N)] * 3
    return call(kernels["product"], (TILES, TILES, 1), (32, 32, 1), [*matrices, TILES])


def traced(launch: Call, blocks: int = 1) -> Trace:
    code = launch.kernel.code
    indices = [launch.launch.block_index(number) for number in range(blocks)]
    return trace_blocks(code, launch.launch, indices, main_loop(code, launch.launch), ARCHITECTURES["sm_86"])


def counted(launch: Call) -> Counters:
    return count(traced(launch))


def test_addresses_are_those_of_the_source(kernels: dict[str, Kernel]) -> None:
    launch = launched(kernels, "strided")
    run = Interpreter(launch.kernel.code, launch.launch, [(3, 0, 0)]).run()
    [load, store] = [step.addresses for step in run if step.addresses is not None]
    index = 3 * 256 + np.arange(256)
    assert (load - load[0] == 32 * (index - index[0])).all()
    assert (store - store[0] == 4 * (index - index[0])).all()
    first = Interpreter(launch.kernel.code, launch.launch, [(0, 0, 0)]).run()
    base = next(step.addresses[0] for step in first if step.addresses is not None)
    assert load[0] - base == 32 * 3 * 256


@pytest.mark.parametrize(("name", "sectors"), [("copy", 4), ("strided", 32)])
def test_coalesced_and_strided_loads(kernels: dict[str, Kernel], name: str, sectors: int) -> None:
    counters = counted(launched(kernels, name))
    assert counters.sectors == 8 * (sectors + 4)  # eight warps; the store is coalesced
    assert counters.least_sectors == 8 * (4 + 4)
    assert counters.load_bytes == 1024 and counters.wide_load_share == 0


def test_guarded_threads_access_nothing(kernels: dict[str, Kernel]) -> None:
    launch = launched(kernels, "guarded", 4, 100)
    assert counted(launch).sectors == 2 * -(-400 // 32)
    assert counted(launched(kernels, "guarded", 4, 256)).sectors == 2 * 32


def test_column_of_a_tile_conflicts_in_every_bank(kernels: dict[str, Kernel]) -> None:
    launch = call(kernels["transpose"], (1, 1, 1), (32, 32, 1), [Buffer(4096), Buffer(4096)])
    counters = counted(launch)
    assert counters.wavefronts == 32 * (1 + 32)
    assert counters.least_wavefronts == 32 * 2
    assert counters.bank_conflict_factor == pytest.approx(16.5)


def test_loop_is_cut_but_counted_in_full(kernels: dict[str, Kernel]) -> None:
    launch = product(kernels)
    loop = main_loop(launch.kernel.code, launch.launch)
    assert loop.end >= 0 and loop.kept < loop.turns
    counters = counted(launch)
    assert counters.flops == pytest.approx(2 * 32 * 32 * N, rel=0.02)
    assert counters.multiply_adds == pytest.approx(32 * N, rel=0.02)
    assert counters.load_bytes == pytest.approx(2 * 4 * 32 * N, rel=0.02)
    assert counters.sector_ratio == 1 and counters.bank_conflict_factor == 1


def test_all_blocks_of_a_multiprocessor_are_there(kernels: dict[str, Kernel]) -> None:
    trace = traced(launched(kernels, "copy"), blocks=3)
    assert (trace.warps, trace.warps_of_block) == (24, 8)
    assert all(step.warps.all() for step in trace.steps)
