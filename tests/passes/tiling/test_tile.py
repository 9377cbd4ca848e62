from __future__ import annotations

import itertools

import numpy as np
import pytest
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from hybridc.passes.fuse.attention import fuse_attention
from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.program.program import Program, is_same, operator_name, tensor_shape
from hybridc.passes.tiling.tile import emit_tiles, tile
from hybridc.passes.tiling.tile_sizes import TiledTensor
from hybridc.passes.tiling.working_set import kernel_groups, largest_working_set_bytes
from tests.support.programs import drawn, program_of
from tests.support.tiled import Network, assert_same_results, held_bytes

KIB = 1 << 10


def tiled(before: Program, limit_bytes: int) -> Program:
    """The tiled program, after a check that it computes the same and stays within the limit.

    What cuts up an input or puts an output together is as large as that.
    """
    after = tile(before, limit_bytes)
    assert all(after.origins[b.var.name] for b in after.bindings)
    assert largest_working_set_bytes(before) > limit_bytes
    assert max(g.size_bytes for g in kernel_groups(after) if not g.only_moves) <= limit_bytes
    assert_same_results(after, before)
    return after


def operators(program: Program) -> list[str]:
    return [operator_name(b.value) for b in program.bindings]


def shapes(program: Program, operator: str) -> list[tuple[int, ...]]:
    return [tensor_shape(b.var) for b in program.bindings if operator_name(b.value) == operator]


def u_net(size: int = 16) -> Program:
    """One level down and up again, with a skip."""
    net = Network(1, 2, size, size)
    skip = net.conv(net.conv(net.x, 8), 8)
    low = net.conv(net.emit(relax.op.nn.max_pool2d(skip, (2, 2), (2, 2))), 8)
    up = net.emit(net.enlarged(low, size))
    both = net.emit(relax.op.concat([skip, up], axis=1), "concat")
    return net.program(net.conv(net.conv(both, 8), 2, taps=1))


def test_a_program_whose_kernels_fit_is_left_alone():
    before = u_net()
    assert tile(before, largest_working_set_bytes(before)) is before


def test_limits_that_the_same_tiles_are_within_make_the_same_program():
    before = u_net()
    largest_bytes = largest_working_set_bytes(before)
    fine = tile(before, largest_bytes // 4)
    slightly_more_bytes = largest_bytes // 4 + 1
    assert is_same(tile(before, slightly_more_bytes), fine)
    assert not is_same(tile(before, largest_bytes // 2), fine)
    assert not is_same(before, fine)


def test_operators_become_calls_on_bands():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4, 8, 8), "float32"), w: R.Tensor((4, 4, 1, 1), "float32")):
            conv = R.nn.conv2d(x, w)
            relu = R.nn.relu(conv)
            pool = R.nn.max_pool2d(relu, pool_size=[2, 2], strides=[2, 2])
            return (pool,)

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 4, 8, 8), "float32"), w: R.Tensor((4, 4, 1, 1), "float32")):
            x0 = R.strided_slice(x, axes=[2], begin=[0], end=[4])
            conv0 = R.nn.conv2d(x0, w)
            relu0 = R.nn.relu(conv0)
            pool0 = R.nn.max_pool2d(relu0, pool_size=[2, 2], strides=[2, 2])
            x1 = R.strided_slice(x, axes=[2], begin=[4], end=[8])
            conv1 = R.nn.conv2d(x1, w)
            relu1 = R.nn.relu(conv1)
            pool1 = R.nn.max_pool2d(relu1, pool_size=[2, 2], strides=[2, 2])
            pool = R.concat((pool0, pool1), axis=2)
            return (pool,)

    before = program_of(Before, {"w": drawn(0, 4, 4, 1, 1)})
    after = tiled(before, 1600)
    assert_structural_equal(after.module, Expected)
    assert [b.var.name for b in after.bindings][1:4] == ["conv.band0", "relu.band0", "pool.band0"]
    assert after.origins["relu.band1"] == after.origins["relu.band0"] == ("node_relu",)


def test_a_window_reads_the_border_rows_of_the_neighbours():
    net = Network(1, 4, 16, 16)
    x = net.conv(net.conv(net.x, 4), 4)
    after = tiled(net.program(net.conv(x, 4)), 5 * KIB)
    halos = [b for b in after.bindings if operator_name(b.value) == "halo"]
    assert [tensor_shape(h.var) for h in halos] == [(1, 4, 6, 16)] * 8
    inner = [tensor_shape(argument) for argument in halos[1].value.args[1].fields]
    assert inner == [(1, 4, 1, 16), (1, 4, 4, 16), (1, 4, 2, 16)]


def test_kernels_of_equal_halos_are_one_though_rounds_make_them():
    net = Network(1, 4, 16, 16)
    chains = [net.conv(net.conv(net.x, 4, name=name), 4, name=name) for name in "ab"]
    before = program = net.program(*chains)
    for name in "ab":
        cut = [binding.var for binding in program.bindings if binding.var.name.startswith(name)]
        program = emit_tiles(program, {var: TiledTensor(2, (0, 8, 16)) for var in cut})
    halos = {g.name_hint for g in program.functions if g.name_hint.startswith("halo")}
    called = [b.value.args[0].name_hint for b in program.bindings if operator_name(b.value) == "halo"]
    assert len(called) == 2 * len(halos)
    assert_same_results(program, before)


def test_fuse_makes_halos_and_epilogues_part_of_the_convolution():
    fused = fuse(tile(u_net(), 10 * KIB))
    names = {operator_name(b.value) for b in fused.bindings}
    assert {"halo_conv2d_add_relu", "halo_concat_conv2d_add_relu"} <= names
    assert not names & {"halo", "add", "relu", "add_relu"}


def test_each_of_two_convolutions_reads_the_halo_itself():
    net = Network(1, 4, 16, 16)
    x = net.conv(net.x, 4)
    both = [net.conv(x, 4), net.conv(x, 8)]
    names = {operator_name(b.value) for b in fuse(tiled(net.program(*both), 5 * KIB)).bindings}
    assert "halo_conv2d_add_relu" in names and "halo" not in names


def test_a_skip_and_what_comes_up_are_joined_by_the_convolution_that_reads_them():
    after = tiled(u_net(), 12 * KIB)
    fused = fuse(after)
    joined = [b.value for b in fused.bindings if operator_name(b.value).startswith("halo_concat")]
    assert joined
    assert all(tensor_shape(argument)[1] == 8 for call in joined for argument in call.args[1].fields[:2])


@pytest.mark.parametrize(
    ("size", "limit_bytes"), [(16, 7 * KIB), pytest.param(20, 14 * KIB, marks=pytest.mark.slow)]
)
def test_a_u_net_fits_any_limit_that_its_weights_allow(size, limit_bytes):
    tiled(u_net(size), limit_bytes)


def test_small_late_layers_stay_whole():
    net = Network(1, 4, 32, 32)
    x = net.conv(net.conv(net.x, 4), 4)
    x = net.emit(relax.op.nn.max_pool2d(x, (4, 4), (4, 4)), "pool")
    after = tiled(net.program(net.conv(net.conv(x, 4), 4)), 20 * KIB)
    assert shapes(after, "conv2d")[-2:] == [(1, 4, 8, 8)] * 2


def test_heights_need_not_divide():
    net = Network(1, 3, 13, 16)
    x = net.conv(net.conv(net.x, 4), 4, strides=2)
    after = tiled(net.program(net.conv(x, 4)), 3 * KIB)
    assert {shape[2] for shape in shapes(after, "conv2d")} > {1, 2}


def test_a_residual_sum_reads_bands_of_both_operands():
    net = Network(1, 4, 16, 16)
    x = net.conv(net.x, 4)
    total = net.emit(relax.op.add(net.conv(net.conv(x, 4), 4), x), "sum")
    after = tiled(net.program(net.conv(total, 4)), 6 * KIB)
    assert all(tensor_shape(b.var)[2] < 16 for b in after.bindings if b.var.name.startswith("sum.band"))


def test_a_batch_is_cut_into_samples_before_rows():
    net = Network(4, 4, 8, 8)
    program = net.program(net.conv(net.conv(net.x, 4), 4))
    assert shapes(tiled(program, 5 * KIB), "conv2d") == [(2, 4, 8, 8)] * 4
    assert set(shapes(tiled(program, 2 * KIB), "conv2d")) == {(1, 4, 2, 8)}


def test_large_weights_are_cut_into_output_channels():
    net = Network(1, 64, 4, 4)
    after = tiled(net.program(net.conv(net.conv(net.x, 64), 64)), 50 * KIB)
    assert {w.shape for w in after.weights.values() if w.ndim == 4 and w.shape[2] == 3} == {(16, 64, 3, 3)}
    assert len([w for w in after.weights.values() if w.ndim == 4 and w.shape[2] == 3]) == 8


def test_parts_of_weights_have_one_name_in_all_ways_to_cut_up():
    # one artifact has plans for several of them, and each weight once
    net = Network(1, 64, 4, 4)
    before = net.program(net.conv(net.x, 96, taps=1))
    ways = [tile(before, limit) for limit in (24 * KIB, 12 * KIB, 8 * KIB)]
    assert len({len(way.weights) for way in ways}) == len(ways)
    for one, other in itertools.combinations(ways, 2):
        for name in one.weights.keys() & other.weights.keys():
            assert np.array_equal(one.weights[name], other.weights[name]), name


def test_parts_of_weights_are_no_copies():
    net = Network(4, 128)
    product = net.emit(relax.op.matmul(net.x, net.weight(128, 512)), "product")
    summed = net.emit(relax.op.add(product, net.weight(512)))
    before = net.program(net.emit(relax.op.matmul(summed, net.weight(512, 16)), "logits"))
    ways = [tile(before, limit) for limit in (200 * KIB, 100 * KIB, 50 * KIB)]
    assert len({len(way.weights) for way in ways}) == len(ways)
    held = held_bytes(weight for way in ways for weight in way.weights.values())
    assert held == held_bytes(before.weights.values()) == 4 * (128 * 512 + 512 + 512 * 16)


def test_columns_of_a_large_product_are_cut():
    net = Network(4, 32)
    product = net.emit(relax.op.matmul(net.x, net.weight(32, 256)), "logits")
    after = tiled(net.program(net.emit(relax.op.add(product, net.weight(256)))), 12 * KIB)
    assert shapes(after, "matmul") == [(4, 64)] * 4


def test_a_cut_weight_of_a_tied_embedding_is_transposed_part_by_part():
    net = Network(4, 32)
    table = net.weight(256, 32)
    turned = net.emit(relax.op.permute_dims(table, [1, 0]))
    product = net.emit(relax.op.matmul(net.x, turned), "logits")
    after = tiled(net.program(product), 12 * KIB)
    assert {operator_name(b.value) for b in fuse(after).bindings} == {"permute_dims_matmul", "concat"}


def attention() -> Program:
    """64 queries of depth 8: tensors of 2 KiB, and scores of 16 KiB."""
    net = Network(1, 64, 8)
    keys = net.emit(relax.op.permute_dims(net.x, [0, 2, 1]))
    scores = net.emit(relax.op.nn.softmax(net.emit(relax.op.matmul(net.x, keys)), axis=-1))
    return net.program(net.emit(relax.op.matmul(scores, net.x)))


def test_rows_of_attention_are_cut_and_its_softmax_with_them():
    after = tile(attention(), 12 * KIB, lambda match: False)
    assert set(shapes(after, "softmax")) == {(1, 16, 64)}
    assert_same_results(after, attention())


def test_scores_that_are_stored_nowhere_need_no_memory():
    before = attention()
    assert tile(before, 6 * KIB) is before
    after = tiled(before, 5 * KIB)
    assert set(shapes(after, "softmax")) == {(1, 16, 64)}
    assert {operator_name(b.value) for b in fuse(fuse_attention(after)).bindings} >= {"attention"}


def test_bands_are_listed_in_the_order_in_which_results_need_them():
    net = Network(1, 4, 32, 8)
    x = net.conv(net.conv(net.conv(net.x, 4, name="a"), 4, name="b"), 4, name="c")
    after = tiled(net.program(x), 3 * KIB)
    names = [b.var.name for b in after.bindings if operator_name(b.value) == "conv2d"]
    assert names.index("c.band0") < names.index("a.band3")


def test_images_side_by_side_are_joined_by_the_convolution_that_reads_them():
    net = Network(1, 4, 16, 8)
    both = net.emit(relax.op.concat([net.conv(net.x, 4), net.conv(net.x, 4)], axis=3))
    after = tiled(net.program(net.conv(both, 4)), 6 * KIB)
    assert not any(
        b.var.name.endswith(".band0") for b in after.bindings if operator_name(b.value) == "concat"
    )


def test_bands_of_padding_alone_are_not_cut():
    net = Network(1, 4, 8, 8)
    value = relax.op.nn.conv2d(net.x, net.weight(4, 4, 1, 1), padding=(8, 0))
    program = net.program(net.emit(value))
    assert_same_results(tile(program, KIB), program)


def test_a_function_that_is_named_as_an_operator_stays_whole():
    @I.ir_module
    class Before:
        @T.prim_func(s_tir=True)
        def maximum(x: T.Buffer((8, 64), "float32"), y: T.Buffer((8, 64), "float32")):
            for i, j in T.grid(8, 64):
                with T.sblock("maximum"):
                    v, w = T.axis.remap("SS", [i, j])
                    y[v, w] = T.max(x[v, w], T.float32(0))

        @R.function
        def main(x: R.Tensor((8, 64), "float32")):
            cls = Before
            y = R.call_tir(cls.maximum, (x,), R.Tensor((8, 64), "float32"))
            return (y,)

    program = program_of(Before)
    assert tile(program, 1024) is program


def test_a_deep_network_needs_no_recursion():
    net = Network(1, 2, 8, 8)
    x = net.x
    for _ in range(400):
        x = net.emit(relax.op.nn.max_pool2d(net.emit(relax.op.tanh(x)), (1, 1), (1, 1)))
    after = tile(net.program(net.conv(x, 2)), 800)
    assert operators(after).count("tanh") == 800


def test_the_same_program_gives_the_same_bands():
    first, second = (tile(u_net(), 9 * KIB) for _ in range(2))
    assert_structural_equal(first.module, second.module)
    assert list(first.origins.items()) == list(second.origins.items())
