"""Winograd's algorithm on a GPU: drawn shapes compute what numpy says, and faults do not go unnoticed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.relax import op

from hybridc import emulator
from hybridc.codegen.cuda_callback import cuda_compiler
from hybridc.codegen.cuda_functions import corrected
from hybridc.emulator import ThreadOrder
from hybridc.errors import DeviceError
from hybridc.machine import gpu_named
from hybridc.schedules.cuda.core.anchor import find_anchor
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function
from hybridc.schedules.cuda.tile.read import read_product
from hybridc.schedules.cuda.winograd import kernel
from hybridc.schedules.cuda.winograd.kernel import scheduled_convolution
from hybridc.schedules.cuda.winograd.plan import PLANES, Plan, choose
from hybridc.schedules.cuda.winograd.read import Convolution, read_convolution
from hybridc.schedules.cuda.winograd.winograd import winograd
from hybridc.schedules.rule import Request, Scheduled
from hybridc.targets import parse_target
from tests.schedules.cuda.families import Array, Family, convolution
from tests.schedules.cuda.tensor_cores import names_to_run
from tests.support.emulated import compile_for_emulator

TARGET = parse_target("cuda:sm_80+avx2")
DRAWN = 10
RELATIVE_ERROR = 3e-6
"""Of the largest result; the transforms add some roundings to those of direct convolution."""


def requested(family: Family, **settings: object) -> Request:
    """With the weights known."""
    function = family.function("kernel")
    names = [str(p.name) for p in function.params]
    return replace(Request(function, frozenset({names.index("p1")}), TARGET), **settings)  # type: ignore[arg-type]


def read(request: Request) -> Convolution | None:
    anchor = find_anchor(request.function)
    product = None if anchor is None else read_product(request.function, anchor.name)
    return None if product is None else read_convolution(product, request)


@dataclass(frozen=True)
class Case:
    family: Family
    number: int
    """Of the plane."""
    parts: int

    def scheduled(self, name: str) -> Scheduled:
        request = requested(self.family)
        conv = read(request)
        assert conv is not None
        plan = Plan(conv, PLANES[self.number])
        plan = replace(plan, parts=min(self.parts, plan.turns))
        function = scheduled_convolution(request.function, plan)
        made = finish_function(function.with_attr("global_symbol", name), "winograd", cuda_target(TARGET))
        assert made is not None
        return replace(made, packings=((plan.conv.position, plan.conv.packing),))


def drawn_cases() -> dict[str, Case]:
    """Images and channels with tails; outputs of odd sides, and of pairs that are not aligned."""
    generator = random.Random(3)
    cases = {}
    for number in range(DRAWN):
        sides = generator.choice((4, 6, 7, 9, 12)), generator.choice((4, 5, 8, 10, 13))
        channels = generator.choice((3, 8, 17, 40))
        filters = generator.choice((6, 33, 64, 72))
        family = convolution(
            (generator.choice((1, 1, 3)), channels, *sides),
            (filters, channels, 3, 3),
            residual=generator.random() < 0.5,
            padding=generator.choice((0, 1, 1, 2)),
        )
        cases[f"drawn_{number}"] = Case(family, number % len(PLANES), generator.choice((1, 1, 2, 3)))
    return cases


CASES = drawn_cases()


@dataclass
class Built:
    """Kernels in a library for the emulated GPU."""

    scheduled: Mapping[str, Scheduled]
    library: tvm.runtime.Module
    source: str

    def error(self, name: str, family: Family, order: ThreadOrder) -> float:
        """The largest, as a share of the largest result; NaN where an element was not written."""
        emulator.start(64 << 20, thread_order=order)
        device, inputs = tvm.cuda(0), family.draw()
        scheduled, parameters = self.scheduled[name], family.function("kernel").params
        fed = [inputs[int(str(p.name).removeprefix("p"))] for p in parameters[: len(inputs)]]
        for position, packing in scheduled.packings:
            fed[position] = packing.apply(fed[position])
        rest = scheduled.function.params[len(inputs) :]
        fresh = [tvm.runtime.empty([int(e) for e in p.shape], "float32", device) for p in rest]
        self.library[name](*(tvm.runtime.tensor(x, device) for x in fed), *fresh)
        device.sync()
        want = family.reference(*(x.astype(np.float64) for x in inputs))
        assert isinstance(want, np.ndarray)
        return float(np.abs(fresh[0].numpy() - want).max() / max(1.0, np.abs(want).max()))


def build(cases: Mapping[str, Case], edit: Callable[[str], str] = lambda source: source) -> Built:
    scheduled = {name: case.scheduled(name) for name, case in cases.items()}
    sources: list[str] = []

    def compile_edited(source: str) -> bytes:
        sources.append(edit(corrected(str(source))))
        return compile_for_emulator(sources[0])

    emulator.start(64 << 20)
    with cuda_compiler(compile_edited):
        module = tvm.IRModule({name: s.function for name, s in scheduled.items()})
        library = tvm.compile(module, target=tvm.target.Target(cuda_target(TARGET), host="llvm"))
    return Built(scheduled, library, sources[0])


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Built:
    """Of the cases that are to run, or of all where none is named."""
    chosen = names_to_run(request, test_drawn_convolution_is_what_numpy_says)
    return build({name: case for name, case in CASES.items() if name in chosen or not chosen})


@pytest.mark.parametrize("name", CASES)
def test_drawn_convolution_is_what_numpy_says(name: str, built: Built) -> None:
    for order in (ThreadOrder.WARPS, ThreadOrder.SHUFFLED):
        assert built.error(name, CASES[name].family, order) <= RELATIVE_ERROR


@pytest.mark.parametrize(
    "architecture", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_75", "sm_80")), "sm_86"]
)
def test_sums_stay_in_registers(architecture: str, built: Built) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from hybridc.codegen.cuda import compile_cubin
    from hybridc.gpu_model.kernel import kernels_of

    try:
        kernels = kernels_of(compile_cubin(built.source, architecture))
    except DeviceError:
        pytest.skip("nvdisasm is not installed")
    assert len(kernels) >= len(built.scheduled)
    assert {name: k.resources.local_bytes for name, k in kernels.items() if k.resources.local_bytes} == {}


FAULT = {"fault": Case(convolution((1, 24, 12, 12), (64, 24, 3, 3), padding=1), 0, 1)}


def shows(faulty: Built) -> bool:
    """Whether some order of threads computes something else."""
    return not all(faulty.error("fault", FAULT["fault"].family, o) <= RELATIVE_ERROR for o in ThreadOrder)


def test_a_missing_barrier_shows() -> None:
    mark = "__syncthreads();"
    barriers = build(FAULT).source.count(mark)
    assert barriers >= 4  # around a slice, and around an exchange
    for number in range(barriers):

        def without(source: str, number: int = number) -> str:
            first, *rest = source.split(mark)
            return first + "".join((mark if i != number else "") + part for i, part in enumerate(rest))

        assert shows(build(FAULT, without)), number


def test_a_wrong_sign_of_a_transform_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel.data_transformed

    def wrong(line: list[tirx.Var]) -> list[tirx.Var]:
        first, second, third, fourth = right(line)
        return [first, second, third, tirx.FloatImm("float32", 0.0) - fourth]

    monkeypatch.setattr(kernel, "data_transformed", wrong)
    assert shows(build(FAULT))


@pytest.mark.parametrize(
    "family",
    [
        convolution((1, 16, 9, 9), (16, 16, 3, 3), padding=1, stride=2),
        convolution((1, 16, 9, 9), (16, 16, 3, 3), padding=2, dilation=2),
        convolution((1, 16, 9, 9), (16, 16, 5, 5), padding=2),
        convolution((1, 16, 9, 9), (16, 8, 3, 3), padding=1, groups=2),
        convolution((1, 16, 9, 9), (16, 16, 1, 1)),
        convolution((1, 16, 40), (16, 16, 3), padding=1),
    ],
)
def test_others_are_left_to_others(family: Family) -> None:
    assert read(requested(family)) is None


def test_weights_have_to_be_known_and_of_this_function_alone() -> None:
    family = convolution((1, 64, 28, 28), (64, 64, 3, 3), padding=1)
    request = requested(family)
    assert winograd(request) is not None
    assert winograd(replace(request, constants=frozenset())) is None
    assert winograd(replace(request, shared_constants=request.constants)) is None
    assert winograd(replace(request, winograd=False)) is None


def test_packed_weights_are_as_many_bytes() -> None:
    # the plan counts those that the model has
    scheduled = winograd(requested(convolution((1, 64, 28, 28), (72, 64, 3, 3), padding=1)))
    assert scheduled is not None
    [(position, packing)] = scheduled.packings
    weights: Array = np.arange(72 * 64 * 9, dtype=np.float32).reshape(72, 64, 3, 3)
    packed = packing.apply(weights)
    assert packed.nbytes == weights.nbytes
    assert packed.shape == tuple(int(e) for e in scheduled.function.params[position].shape)
    assert np.array_equal(packed, weights.transpose(1, 2, 3, 0))


def test_channels_are_split_where_images_are_small() -> None:
    gpu = gpu_named("rtx-3090")
    small, large = (
        read(requested(convolution((1, 256, side, side), (256, 256, 3, 3), padding=1))) for side in (14, 224)
    )
    assert small is not None and choose(small, gpu).parts > 1
    assert large is not None and choose(large, gpu).parts == 1


def test_epilogues_with_conditions_are_stored_one_by_one() -> None:
    family = convolution((1, 8, 6, 6), (32, 8, 3, 3), padding=1)
    clipped = replace(
        family,
        build=lambda emit, x, w, b: op.clip(emit(op.nn.conv2d(x, w, padding=1)), 0, 1) * b,
        reference=lambda x, w, b: np.clip(family.reference(x, w, 0 * b), 0, 1) * b,
    )
    cases = {"clipped": Case(clipped, 1, 1)}
    assert build(cases).error("clipped", clipped, ThreadOrder.FORWARD) <= RELATIVE_ERROR
