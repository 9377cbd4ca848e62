"""Networks cut up in several ways share functions and weights, each of which must suit all of them."""

# mypy: disable-error-code="valid-type"
from __future__ import annotations

import numpy as np
import tvm
from tvm import tirx
from tvm.script import ir as I
from tvm.script import relax as R

from hybridc.ir import Device
from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.program.program import with_own_names
from hybridc.passes.schedule import (
    schedule_functions,
    schedule_requests,
    with_agreed_layouts,
    with_one_layout,
)
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Scheduled
from hybridc.targets import parse_target
from tests.support.programs import compiled, drawn, program_of


@I.ir_module
class Parts:
    @R.function
    def main(  # type: ignore[no-untyped-def]
        x: R.Tensor((4, 8), "float32"),
        z: R.Tensor((3, 8), "float32"),
        w: R.Tensor((8, 8), "float32"),
    ):
        with R.dataflow():
            a = R.matmul(x, w)
            b = R.matmul(a, w)
            c = R.matmul(z, w)
            R.output(b, c)
        return (b, c)


def test_a_function_alone_with_its_layout_of_a_weight_is_none_of_the_gpu() -> None:
    program = fuse(program_of(Parts, {"w": drawn(0, 8, 8)}))
    functions = {g.name_hint: f for g, f in program.functions.items() if isinstance(f, tirx.PrimFunc)}
    many, single = sorted(functions, key=lambda name: -int(functions[name].params[0].shape[0]))
    transposed = Packing((8, 8), (8, 8), (1, 0))
    for packed, other in ((many, single), (single, many)):
        scheduled = {
            (name, device): Scheduled(f, "a rule", ((1, transposed),) if name == packed else ())
            for name, f in functions.items()
            for device in Device
        }
        left = with_one_layout(program, scheduled)
        assert set(scheduled) - set(left) == {(single, Device.GPU)}
        del scheduled[other, Device.GPU]
        assert with_one_layout(program, scheduled) is scheduled


def layouts(module: tvm.IRModule) -> set[Packing | None]:
    """Of the weight, which is the second argument of all functions, on a GPU."""
    program = fuse(program_of(module, {"w": drawn(0, 64, 64, 3, 3)}))
    target = parse_target("cuda:sm_80+avx2")
    requests = schedule_requests(program, target)
    scheduled = with_agreed_layouts(program, requests, schedule_functions(requests, [Device.GPU]))
    assert with_one_layout(program, scheduled) is scheduled
    assert len(scheduled) == 2
    return {dict(made.packings).get(1) for made in scheduled.values()}


def test_tiles_of_a_convolution_share_the_layout_of_its_weight() -> None:
    @I.ir_module
    class Tiles:
        @R.function
        def main(  # type: ignore[no-untyped-def]
            x: R.Tensor((1, 64, 34, 64), "float32"),
            z: R.Tensor((1, 64, 18, 64), "float32"),
            w: R.Tensor((64, 64, 3, 3), "float32"),
        ):
            with R.dataflow():
                a = R.nn.conv2d(x, w)
                b = R.nn.conv2d(z, w)
                R.output(a, b)
            return (a, b)

    shape = (64, 64, 3, 3)
    assert layouts(Tiles) == {Packing(shape, shape, (1, 2, 3, 0))}


def test_a_weight_that_is_read_in_two_ways_stays_as_it_is() -> None:
    @I.ir_module
    class Ways:
        @R.function
        def main(  # type: ignore[no-untyped-def]
            x: R.Tensor((1, 64, 34, 64), "float32"),
            z: R.Tensor((64, 64, 3, 3), "float32"),
            w: R.Tensor((64, 64, 3, 3), "float32"),
        ):
            with R.dataflow():
                a = R.nn.conv2d(x, w)
                b = R.add(z, w)
                R.output(a, b)
            return (a, b)

    assert layouts(Ways) == {None}


def test_a_weight_with_the_name_of_another_one_gets_its_own() -> None:
    w = drawn(0, 8, 8)
    program = program_of(Parts, {"w": w})
    assert with_own_names(program, {"w": w.copy(), "v": drawn(1, 8, 8)}) is program
    others = {"w": drawn(1, 8, 8), "w_0": drawn(2, 8, 8), "w_1": w.copy()}
    named = with_own_names(program, others)
    assert list(named.weights) == ["w_1"] and named.weights["w_1"] is w
    del others["w_1"]
    assert list(with_own_names(program, others).weights) == ["w_1"]
    feeds = drawn(3, 4, 8), drawn(4, 3, 8)
    for found, wanted in zip(
        compiled(named.module)(*feeds, w), (feeds[0] @ w @ w, feeds[1] @ w), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert list(named.origins) == list(program.origins)
