from __future__ import annotations

import pytest
from tvm import te, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from hybridc.appended_rows import appended_integer_rows, appended_rows
from hybridc.ir import Device, Graph, Role
from hybridc.ir.graph import FAMILIES, OTHER_FAMILY
from hybridc.ir.plan import align
from hybridc.passes import read_graph as module
from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.read_graph import read_graph
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.select import rules, schedule
from hybridc.targets import parse_target
from tests.support.programs import drawn, program_of


def graph_of(module, weights=None) -> Graph:
    program = fuse(program_of(module, weights))
    scheduled = {
        (g.name_hint, device): Scheduled(
            f, "as it is", workspace_bytes=(100, 300) if device is Device.GPU else ()
        )
        for g, f in program.module.functions.items()
        if isinstance(f, tirx.PrimFunc)
        for device in Device
    }
    return read_graph(program, scheduled)


@I.ir_module
class Block:
    @R.function
    def main(
        x: R.Tensor((1, 4, 6, 6), "float32"),
        w: R.Tensor((4, 4, 3, 3), "float32"),
        v: R.Tensor((144, 8), "float32"),
    ):
        with R.dataflow():
            c = R.nn.conv2d(x, w, padding=(1, 1))
            d = R.add(c, x)
            f = R.reshape(d, (1, 144))
            e = R.matmul(f, v)
            y = R.nn.softmax(e)
            R.output(y, f)
        return (y, f)


@pytest.fixture(scope="module")
def block() -> Graph:
    return graph_of(Block, {"w": drawn(0, 4, 4, 3, 3), "v": drawn(1, 144, 8)})


def test_kernels_stand_in_order_with_their_nodes(block):
    assert [k.name for k in block.kernels] == ["conv2d", "matmul", "softmax"]
    assert block.kernel["conv2d"].origins == ("node_c", "node_d")


def test_a_view_names_the_tensor_whose_bytes_it_sees(block):
    assert block.kernel["matmul"].inputs == ("conv2d", "v")
    assert block.outputs == ("softmax", "conv2d")


def test_roles_follow_from_the_interface(block):
    roles = {t.name: t.role for t in block.tensors}
    assert roles == {
        "x": Role.INPUT,
        "w": Role.WEIGHT,
        "v": Role.WEIGHT,
        "conv2d": Role.OUTPUT,
        "matmul": Role.ACTIVATION,
        "softmax": Role.OUTPUT,
    }


def test_flops_and_bytes_are_those_of_the_mathematics(block):
    conv = block.kernel["conv2d"]
    assert conv.flops == pytest.approx(2 * 4 * 36 * 4 * 9 + 4 * 36, rel=0.02)
    assert conv.bytes_moved == 4 * (144 + 144 + 144)
    assert block.kernel["matmul"].flops == 2 * 144 * 8


def test_workspace_is_counted_per_device_and_aligned(block):
    assert block.kernel["conv2d"].gpu_workspace_bytes == align(100) + align(300)
    assert block.kernel["conv2d"].cpu_workspace_bytes == 0


@I.ir_module
class Overwrites:
    @R.function
    def main(x: R.Tensor((4, 6), "float32"), row: R.Tensor((1, 6), "float32")):
        with R.dataflow():
            a = R.add(x, row)
            s = R.nn.softmax(a)
            t = R.permute_dims(s, axes=[1, 0])
            u = R.astype(t, "float16")
            y = R.multiply(t, t)
            R.output(u, y)
        return (u, y)


def test_only_an_input_read_where_it_is_written_may_be_overwritten():
    graph = graph_of(Overwrites)
    overwrite = {k.name: k.may_overwrite for k in graph.kernels}
    assert overwrite["add"] == (("add", "x"),)  # not the broadcast row
    assert overwrite["softmax"] == ()  # reads a whole row before it writes
    assert overwrite["permute_dims"] == ()
    assert overwrite["astype"] == ()  # narrower elements
    assert overwrite["multiply"] == (("multiply", "permute_dims"),)


def test_a_residual_input_of_a_convolution_may_be_overwritten_but_not_its_data():
    @I.ir_module
    class Residual:
        @R.function
        def main(
            x: R.Tensor((1, 4, 6, 6), "float32"),
            r: R.Tensor((1, 4, 6, 6), "float32"),
            w: R.Tensor((4, 4, 3, 3), "float32"),
        ):
            with R.dataflow():
                c = R.nn.conv2d(x, w, padding=(1, 1))
                y = R.add(c, r)
                R.output(y)
            return (y,)

    graph = graph_of(Residual, {"w": drawn(0, 4, 4, 3, 3)})
    assert graph.kernels[0].may_overwrite == (("conv2d", "r"),)


def test_an_input_read_twice_is_not_overwritten():
    graph = graph_of(Block, {"w": drawn(0, 4, 4, 3, 3), "v": drawn(1, 144, 8)})
    assert graph.kernel["conv2d"].may_overwrite == ()  # x is the data and the residual


@I.ir_module
class Moves:
    @R.function
    def main(
        table: R.Tensor((1000, 8), "float32"),
        rows: R.Tensor((3,), "int64"),
        x: R.Tensor((4, 9), "float32"),
    ):
        with R.dataflow():
            y = R.take(table, rows, axis=0)
            parts = R.split(x, [2], axis=1)
            first = parts[0]
            second = parts[1]
            R.output(y, first, second)
        return (y, first, second)


def test_of_a_table_only_the_rows_that_are_gathered_are_moved():
    moved = {k.name: k.bytes_moved for k in graph_of(Moves).kernels}
    assert moved["take"] == 4 * (3 * 8 + 3 * 8) + 8 * 3
    assert sorted(moved.values())[1] == 4 * (36 + 8 + 28)  # all of what is split


def test_a_kernel_is_of_the_family_of_its_cpu_rule():
    program = fuse(program_of(Block, {"w": drawn(0, 4, 4, 3, 3), "v": drawn(1, 144, 8)}))
    functions = {g.name_hint: f for g, f in program.module.functions.items() if isinstance(f, tirx.PrimFunc)}
    by = {
        "conv2d_add": ("winograd", "conv2d"),
        "matmul": (None, "matmul"),
        "softmax": ("reduction", OTHER_FAMILY),
    }
    scheduled = {
        (name, device): Scheduled(functions[name], "as it is", family=family)
        for name, pair in by.items()
        for device, family in zip((Device.CPU, Device.GPU), pair, strict=True)
        if family is not None
    }
    graph = read_graph(program, scheduled)
    assert [k.family for k in graph.kernels] == ["winograd", "matmul", "reduction"]


@pytest.mark.parametrize("rule", [r for device in Device for r in rules(device)], ids=lambda r: r.__name__)
def test_every_rule_but_the_fallback_is_of_a_family(rule):
    assert rule.family in FAMILIES
    assert (rule.family == OTHER_FAMILY) == (rule.__name__ == "fallback")


def test_a_function_is_of_the_family_that_its_rule_declares(monkeypatch):
    @schedule_rule(family="pooling")
    def anything(request):
        return Scheduled(request.function, "anything")

    monkeypatch.setattr("hybridc.schedules.cpu.RULES", (anything,))
    function = next(f for f in fuse(program_of(Moves)).functions.values())
    scheduled = schedule(Request(function, frozenset(), parse_target("avx2")), Device.CPU)
    assert scheduled is not None and scheduled.family == "pooling"


def test_a_rule_without_a_family_is_an_error(monkeypatch):
    def undeclared(request):
        return Scheduled(request.function, "undeclared")

    monkeypatch.setattr("hybridc.schedules.cpu.RULES", (undeclared,))
    function = next(f for f in fuse(program_of(Moves)).functions.values())
    with pytest.raises(AttributeError, match="family"):
        schedule(Request(function, frozenset(), parse_target("avx2")), Device.CPU)
    with pytest.raises(ValueError, match="unknown family 'convolutions'"):
        schedule_rule(family="convolutions")


@I.ir_module
class Views:
    @R.function
    def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 8), "float32")):
        with R.dataflow():
            a = R.matmul(x, w)
            b = R.reshape(a, (8, 4))
            c = R.matmul(b, a)
            R.output(c)
        return (c,)


def test_bytes_that_a_kernel_reads_by_a_view_as_well_count_once():
    first, kernel = graph_of(Views, {"w": drawn(0, 8, 8)}).kernels
    assert kernel.inputs == 2 * first.outputs
    assert kernel.bytes_moved == 4 * (4 * 8 + 8 * 8)


@pytest.mark.parametrize("rounds", [False, True])
def test_new_rows_of_a_cache_cost_no_more_in_a_longer_one(rounds: bool) -> None:
    def flops(positions: int) -> int:
        shapes = {
            "past": (1, 2, positions, 36 if rounds else 32),
            "new": (1, 2, 3, 32),
            "before": (1, 1, 1, 1),
        }
        dtypes = {"past": "int8" if rounds else "float32", "new": "float32", "before": "int64"}
        given = [te.placeholder(shape, dtypes[name], name) for name, shape in shapes.items()]
        rows = appended_integer_rows if rounds else appended_rows
        return module._flops(te.create_prim_func([*given, rows(*given)]))

    few, many = flops(64), flops(6400)
    assert many <= few
    if rounds:
        assert few > 0
