"""Offsets, overwriting in place, and the waits that reused bytes need."""

from __future__ import annotations

from random import Random

import pytest

from hybridc.ir import Arena, Buffer, BufferKind, Copy, Device, Graph, Role, Run, Step
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.passes.planner.emit.offsets import MemoryBlock, live_bound, pack
from hybridc.passes.planner.emit.reuse_buffers import live_bytes_bound, reuse_buffers
from tests.support.graphs import GraphBuilder, chain
from tests.support.placements import steps_of

GPU, CPU = Device.GPU, Device.CPU
UNIT = ALIGNMENT_BYTES


def buffers_of(graph: Graph, placement: tuple[Device, ...]) -> tuple[dict[tuple[str, Device], Buffer], Arena]:
    _, buffers, arenas = reuse_buffers(graph, steps_of(graph, placement), (GPU, CPU))
    return {(b.tensor, b.device): b for b in buffers}, arenas[0]


def test_chain_needs_two_tensors_and_all_weights() -> None:
    _, arena = buffers_of(chain(5, size=4, weight=2), (GPU,) * 5)
    assert arena.size_bytes == arena.lower_bound_bytes == (2 * 4 + 5 * 2) * UNIT


def test_weights_of_cpu_kernels_have_no_buffer() -> None:
    held, _ = buffers_of(chain(3), (GPU, CPU, GPU))
    assert {name for name, _ in held if name.startswith("w")} == {"w0", "w2"}
    assert held["w0", GPU].kind is BufferKind.WEIGHT
    assert (held["w0", GPU].first_step, held["w0", GPU].last_step) == (-1, 7)


def overwriting(size: int = 4, later_use: bool = False, role: Role = Role.ACTIVATION) -> Graph:
    build = GraphBuilder()
    x = build.input("x", 4)
    a = build.kernel((x,), {"a": 4}) if role is Role.ACTIVATION else build.tensor("a", 4, role)
    b = build.kernel((a,), {"b": size}, overwrite=(("b", "a"),))
    return build.graph(build.kernel((a, b) if later_use else (b,), {"c": 4}))


def test_output_takes_the_bytes_of_an_input_it_may_overwrite() -> None:
    held, arena = buffers_of(overwriting(), (GPU, GPU, GPU))
    assert held["a", GPU].offset_bytes == held["b", GPU].offset_bytes
    assert arena.size_bytes == 8 * UNIT


@pytest.mark.parametrize(
    "graph",
    [overwriting(later_use=True), overwriting(size=5), overwriting(size=3)],
    ids=["used later", "too large", "smaller"],
)
def test_input_is_not_overwritten_where_that_is_wrong_or_wasteful(graph: Graph) -> None:
    held, _ = buffers_of(graph, (GPU, GPU, GPU))
    one, other = held["a", GPU], held["b", GPU]
    assert one.end_bytes <= other.offset_bytes or other.end_bytes <= one.offset_bytes


def test_weight_is_never_overwritten() -> None:
    held, _ = buffers_of(overwriting(role=Role.WEIGHT), (GPU, GPU))
    assert held["a", GPU].offset_bytes != held["b", GPU].offset_bytes


def test_input_on_the_host_may_be_overwritten_but_not_if_it_is_an_output() -> None:
    build = GraphBuilder()
    x = build.input("x", 4)
    y = build.kernel((x,), {"y": 4}, overwrite=(("y", "x"),))
    held, _ = buffers_of(build.graph(y), (CPU,))
    assert held["x", CPU].offset_bytes == held["y", CPU].offset_bytes
    held, _ = buffers_of(build.graph(y, x), (CPU,))
    assert held["x", CPU].offset_bytes != held["y", CPU].offset_bytes


def test_kernel_waits_for_the_copy_that_still_reads_the_bytes_it_reuses() -> None:
    build = GraphBuilder()
    x = build.input("x", 4)
    a = build.kernel((x,), {"a": 4})
    b = build.kernel((a,), {"b": 4})
    c = build.kernel((b,), {"c": 4})
    graph = build.graph(a, c)
    steps, buffers, _ = reuse_buffers(graph, steps_of(graph, (GPU,) * 3), (GPU, CPU))
    held = {(b.tensor, b.device): b for b in buffers}
    copy_of_a = held["a", CPU].first_step
    assert held["c", GPU].offset_bytes == held["a", GPU].offset_bytes
    assert copy_of_a in steps[held["c", GPU].first_step].waits


def test_each_step_that_writes_a_tensor_begins_a_stay_of_it() -> None:
    build = GraphBuilder()
    a = build.kernel((build.input("x", 4),), {"a": 4})
    b = build.kernel((a,), {"b": 4})
    graph = build.graph(build.kernel((a, b), {"c": 4}))
    steps: list[Step] = [
        *(Copy("x", CPU, GPU), Run("k0", GPU, (0,)), Copy("a", GPU, CPU, (1,)), Run("k1", GPU)),
        *(Copy("a", CPU, GPU, (2,)), Run("k2", GPU, (4,)), Copy("c", GPU, CPU, (5,))),
    ]
    _, buffers, _ = reuse_buffers(graph, steps, (GPU, CPU))
    stays = [(b.first_step, b.last_step) for b in buffers if (b.tensor, b.device) == ("a", GPU)]
    assert stays == [(1, 3), (4, 5)]
    assert [(b.first_step, b.last_step) for b in buffers if (b.tensor, b.device) == ("a", CPU)] == [(2, 4)]


def test_streamed_weight_is_held_from_its_copy_to_its_last_use() -> None:
    graph = chain(2, size=4, weight=2)
    steps: list[Step] = [
        *(Copy("x", CPU, GPU), Copy("w0", CPU, GPU), Run("k0", GPU, (0, 1))),
        *(Copy("w1", CPU, GPU), Run("k1", GPU, (3,)), Copy("t1", GPU, CPU, (4,))),
    ]
    waiting, buffers, arenas = reuse_buffers(graph, steps, (GPU, CPU))
    held = {b.tensor: b for b in buffers if b.kind is BufferKind.WEIGHT}
    assert [(b.first_step, b.last_step) for b in held.values()] == [(1, 2), (3, 4)]
    assert held["w0"].offset_bytes == held["w1"].offset_bytes
    assert waiting[3].waits == (2,)  # for the bytes
    assert arenas[0].size_bytes == (2 * 4 + 2) * UNIT


def test_kernel_that_runs_again_has_its_workspace_again() -> None:
    build = GraphBuilder()
    a = build.kernel((build.input("x", 1),), {"a": 1}, workspace=10)
    again = Run("k0", GPU)
    steps: list[Step] = [Copy("x", CPU, GPU), Run("k0", GPU, (0,)), again, Copy("a", GPU, CPU, (2,))]
    _, buffers, _ = reuse_buffers(build.graph(a), steps, (GPU, CPU))
    workspaces = [b.first_step for b in buffers if b.kind is BufferKind.WORKSPACE]
    assert workspaces == [1, 2]


def test_input_that_is_copied_to_the_host_is_not_overwritten() -> None:
    build = GraphBuilder()
    a = build.kernel((build.input("x", 4),), {"a": 4})
    b = build.kernel((a,), {"b": 4}, overwrite=(("b", "a"),))
    graph = build.graph(a, b)
    held, _ = buffers_of(graph, (GPU, GPU))
    assert held["a", GPU].offset_bytes != held["b", GPU].offset_bytes


def test_bytes_are_not_reused_while_their_last_use_is_predicted_to_run() -> None:
    graph = chain(3, size=4, weight=2)
    steps: list[Step] = [
        *(Copy("x", CPU, GPU), Copy("w0", CPU, GPU), Run("k0", GPU, (0, 1)), Copy("w1", CPU, GPU)),
        *(Run("k1", GPU, (3,)), Copy("w2", CPU, GPU), Run("k2", GPU, (5,)), Copy("t2", GPU, CPU, (6,))),
    ]
    # w1 comes while k0 runs, w2 after k1 has ended
    spans = [(0, 1), (1, 2), (2, 5), (3, 4), (5, 6), (6, 7), (7, 8), (8, 9)]
    timed, buffers, _ = reuse_buffers(graph, steps, (GPU, CPU), spans)
    offset = {b.tensor: b.offset_bytes for b in buffers if b.kind is BufferKind.WEIGHT}
    assert offset["w0"] != offset["w1"]
    assert timed[3].waits == ()
    assert offset["w2"] in (offset["w0"], offset["w1"])


def test_workspace_is_held_for_its_kernel_alone() -> None:
    build = GraphBuilder()
    x = build.input("x", 1)
    a = build.kernel((x,), {"a": 1}, workspace=10)
    held, arena = buffers_of(build.graph(build.kernel((a,), {"b": 1}, workspace=10)), (GPU, GPU))
    assert held["k0", GPU].kind is BufferKind.WORKSPACE
    assert held["k0", GPU].first_step == held["k0", GPU].last_step == 1
    assert arena.size_bytes == 12 * UNIT


def test_sizes_are_exact_and_offsets_aligned() -> None:
    build = GraphBuilder(bytes_each=1)
    x = build.input("x", 100)
    held, arena = buffers_of(build.graph(build.kernel((x,), {"y": UNIT + 1})), (GPU,))
    assert held["y", GPU].size_bytes == UNIT + 1
    assert held["y", GPU].offset_bytes % UNIT == 0
    assert arena.size_bytes == arena.lower_bound_bytes == 3 * UNIT


def test_live_bytes_bound_is_the_arenas_bound() -> None:
    graph = chain(6)
    for placement in [(GPU,) * 6, (CPU,) * 6, (GPU, CPU) * 3]:
        steps = steps_of(graph, placement)
        _, _, arenas = reuse_buffers(graph, steps, (GPU,))
        assert live_bytes_bound(graph, steps, GPU) == arenas[0].lower_bound_bytes


def test_dense_concatenations_pack_to_the_live_bound() -> None:
    build = GraphBuilder()
    features = [build.input("x", 64)]
    for i in range(24):
        joined = build.kernel(tuple(features), {f"c{i}": 64 + 32 * i})
        features.append(build.kernel((joined,), {f"f{i}": 32}, workspace=17))
    graph = build.graph(build.kernel(tuple(features), {"y": 8}))
    _, arena = buffers_of(graph, (GPU,) * len(graph.kernels))
    assert arena.size_bytes <= 1.01 * arena.lower_bound_bytes


def test_long_skips_of_unequal_sizes_pack_close_to_the_live_bound() -> None:
    build = GraphBuilder()
    value, skips = build.input("x", 3000), []
    for i in range(6):
        value = build.kernel((value,), {f"d{i}": 4096 >> i}, workspace=(3001 * (i % 3)) >> i)
        skips.append(value)
        value = build.kernel((value,), {f"p{i}": 1024 >> i})
    for i in reversed(range(6)):
        value = build.kernel((value,), {f"u{i}": 4096 >> i})
        value = build.kernel((value, skips.pop()), {f"m{i}": 8192 >> i})
    graph = build.graph(value)
    _, arena = buffers_of(graph, (GPU,) * len(graph.kernels))
    assert arena.size_bytes <= 1.01 * arena.lower_bound_bytes


@pytest.mark.parametrize("seed", range(10))
def test_packed_blocks_live_at_one_step_share_no_byte(seed: int) -> None:
    random = Random(seed)
    firsts = [random.randint(-1, 30) for _ in range(80)]
    blocks = [MemoryBlock(random.choice([0, 1, 2, 3, 5, 8, 13]), f, f + random.randint(0, 9)) for f in firsts]
    offsets = pack(blocks)
    for i, one in enumerate(blocks):
        for j, other in enumerate(blocks[:i]):
            together = one.first <= other.last and other.first <= one.last
            apart = offsets[i] + one.size_bytes <= offsets[j] or offsets[j] + other.size_bytes <= offsets[i]
            assert apart or not together
    top = max(o + b.size_bytes for o, b in zip(offsets, blocks, strict=True))
    assert live_bound(blocks) <= top <= 1.15 * live_bound(blocks)
    assert pack(blocks) == offsets
