"""Winograd's algorithm on tensor cores: drawn shapes are right, and faults do not go unnoticed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm

from hybridc import emulator
from hybridc.emulator import ThreadOrder
from hybridc.machine import gpu_named
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function
from hybridc.schedules.cuda.tensor_core_winograd import kernel
from hybridc.schedules.cuda.tensor_core_winograd.kernel import tensor_core_convolution
from hybridc.schedules.cuda.tensor_core_winograd.plan import TensorCorePlan, choose
from hybridc.schedules.cuda.tensor_core_winograd.tensor_core_winograd import (
    read_half_convolution,
    tensor_core_winograd,
)
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.storage import stored
from tests.schedules.cuda.families import Array, Family, convolution
from tests.schedules.cuda.tensor_cores import TARGET, built, names_to_run, unedited

DRAWN = 10
HALF = 2.0**-11
"""Of a number, what rounding it to float16 changes."""
ROUNDINGS = 5
"""Of each product at a point: one of its patch, two of its taps along either axis."""
DATA = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
TAPS = np.array([[2, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 2]]) / 2
RESULT = np.array([[1, 1, 1, 0], [0, 1, -1, -1]])
ORDERS = (ThreadOrder.WARPS, ThreadOrder.SHUFFLED)


def requested(family: Family, dtype: str = "float16") -> Request:
    """With the weights known, and everything of 16 bits in memory."""
    function = family.function("kernel")
    names = [str(p.name) for p in function.params]
    narrow = stored(function, dict.fromkeys(range(len(names)), dtype))
    return Request(narrow, frozenset({names.index("p1")}), TARGET)


@dataclass(frozen=True)
class Case:
    family: Family
    padding: int = 1
    parts: int = 1

    def scheduled(self) -> Scheduled:
        request = requested(self.family)
        read = read_half_convolution(request)
        assert read is not None
        plan = TensorCorePlan(read.conv, self.parts)
        function = tensor_core_convolution(request.function, read.wide, plan)
        made = finish_function(function, "tensor_core_winograd", cuda_target(TARGET))
        assert made is not None
        return replace(made, packings=((plan.conv.position, plan.packing),))

    def drawn(self) -> list[Array]:
        return [x.astype(np.float16) for x in self.family.draw()]

    def most_error(self, x: Array, w: Array, *_: Array) -> Array:
        """Of each sum: roundings of the transformed factors, as transforms of their sizes carry them on."""
        images, _, height, width = x.shape
        out = [side + 2 * self.padding - 2 for side in (height, width)]
        padded = np.zeros((images, x.shape[1], *(side + side % 2 + 2 for side in out)))
        rows, columns = (slice(self.padding, self.padding + side) for side in (height, width))
        padded[..., rows, columns] = np.abs(x)
        tiles = np.lib.stride_tricks.sliding_window_view(padded, (4, 4), (2, 3))[:, :, ::2, ::2]
        data, taps, result = np.abs(DATA), np.abs(TAPS), np.abs(RESULT)
        points = np.einsum(
            "ocij,ncyxij->noyxij", taps @ np.abs(w) @ taps.T, data @ tiles @ data.T, optimize=True
        )
        sums = (result @ points @ result.T).transpose(0, 1, 2, 4, 3, 5)
        sums = sums.reshape(images, len(w), *(2 * n for n in tiles.shape[2:4]))
        return ROUNDINGS * HALF * sums[..., : out[0], : out[1]]


def drawn_cases() -> dict[str, Case]:
    """Images whose sides are no multiples of tiles, output channels that do not fill a block."""
    generator = random.Random(5)
    cases = {}
    for number in range(DRAWN):
        sides = generator.choice((4, 5, 6, 9, 12)), generator.choice((4, 7, 8, 10, 13, 18))
        channels, parts = generator.choice(((16, 1), (48, 1), (32, 2), (48, 3), (64, 2)))
        filters, padding = generator.choice((16, 48, 64, 80, 128)), generator.choice((0, 1, 1, 2))
        family = convolution(
            (generator.choice((1, 1, 3)), channels, *sides),
            (filters, channels, 3, 3),
            residual=generator.random() < 0.5,
            padding=padding,
        )
        cases[f"drawn_{number}"] = Case(family, padding, parts)
    return cases


CASES = drawn_cases()


@dataclass
class Built:
    """Kernels in a library for the emulated GPU."""

    scheduled: Mapping[str, Scheduled]
    library: tvm.runtime.Module
    source: str

    def result(self, name: str, case: Case, inputs: list[Array], order: ThreadOrder) -> Array:
        emulator.start(64 << 20, thread_order=order)
        device, scheduled = tvm.cuda(0), self.scheduled[name]
        parameters = requested(case.family).function.params
        fed = [inputs[int(str(p.name).removeprefix("p"))] for p in parameters[: len(inputs)]]
        for position, packing in scheduled.packings:
            fed[position] = packing.apply(fed[position])
        rest = scheduled.function.params[len(inputs) :]
        fresh = [tvm.runtime.empty([int(e) for e in p.shape], str(p.dtype), device) for p in rest]
        self.library[name](*(tvm.runtime.tensor(x, device) for x in fed), *fresh)
        device.sync()
        return fresh[0].numpy().astype(np.float64)

    def is_right(self, name: str, case: Case, order: ThreadOrder) -> bool:
        """Whether no element is NaN, as those that are not written, or too far off."""
        inputs = case.drawn()
        wide = [x.astype(np.float64) for x in inputs]
        want = case.family.reference(*wide)
        assert isinstance(want, np.ndarray)
        most = case.most_error(*wide) + HALF * np.abs(want) + 1e-5
        return bool((np.abs(self.result(name, case, inputs, order) - want) <= most).all())


def build(cases: Mapping[str, Case], edit: Callable[[str], str] = unedited) -> Built:
    scheduled = {name: case.scheduled() for name, case in cases.items()}
    return Built(scheduled, *built(scheduled, edit))


@pytest.fixture(scope="module")
def drawn(request: pytest.FixtureRequest) -> Built:
    """Of the cases that are to run, or of all where none is named."""
    chosen = names_to_run(request, test_drawn_convolution_is_what_numpy_says)
    return build({name: case for name, case in CASES.items() if name in chosen or not chosen})


@pytest.mark.parametrize("name", CASES)
def test_drawn_convolution_is_what_numpy_says(name: str, drawn: Built) -> None:
    for order in ORDERS:
        assert drawn.is_right(name, CASES[name], order)


def test_errors_are_a_few_times_those_of_rounding_once(drawn: Built) -> None:
    for name in drawn.scheduled:
        case = CASES[name]
        inputs = case.drawn()
        want = case.family.reference(*(x.astype(np.float64) for x in inputs))
        found = drawn.result(name, case, inputs, ThreadOrder.FORWARD)
        assert np.abs(found - want).max() <= 4 * HALF * np.abs(want).max()


FAULT = {"fault": Case(convolution((1, 48, 8, 8), (64, 48, 3, 3), padding=1))}


def shows(faulty: Built) -> bool:
    """Whether some order of threads computes something else."""
    return not all(faulty.is_right("fault", FAULT["fault"], order) for order in ThreadOrder)


def test_a_missing_barrier_shows() -> None:
    # the one between what a slice is stored and multiplied by, and stored over again
    assert build(FAULT).source.count("__syncthreads();") == 1
    assert shows(build(FAULT, lambda source: source.replace("__syncthreads();", "")))


def test_a_wrong_rotation_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_LINE", 2)
    assert shows(build(FAULT))


def test_a_wrong_sign_of_a_transform_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel.result_transformed
    monkeypatch.setattr(kernel, "result_transformed", lambda line: right(line)[::-1])
    assert shows(build(FAULT))


def test_sums_of_the_largest_numbers_stay_finite() -> None:
    case = FAULT["fault"]
    made = build(FAULT)
    inputs = case.drawn()
    inputs[0][:] = 60000.0
    inputs[1][:] = 0
    inputs[1][:, :, 1, 1] = 1 / 64
    found = made.result("fault", case, inputs, ThreadOrder.FORWARD)
    want = case.family.reference(*(x.astype(np.float64) for x in inputs))
    assert np.abs(found / want - 1).max() <= 4 * HALF


@pytest.mark.parametrize(
    "family",
    [
        convolution((1, 16, 9, 9), (16, 16, 3, 3), padding=1, stride=2),
        convolution((1, 16, 9, 9), (16, 16, 3, 3), padding=2, dilation=2),
        convolution((1, 16, 9, 9), (16, 16, 5, 5), padding=2),
        convolution((1, 32, 9, 9), (32, 16, 3, 3), padding=1, groups=2),
        convolution((1, 24, 9, 9), (16, 24, 3, 3), padding=1),
        convolution((1, 16, 9, 9), (24, 16, 3, 3), padding=1),
    ],
)
def test_others_are_left_to_others(family: Family) -> None:
    assert read_half_convolution(requested(family)) is None


def test_weights_have_to_be_known_and_fast_algorithms_allowed() -> None:
    family = convolution((1, 64, 56, 56), (64, 64, 3, 3), padding=1)
    request = requested(family)
    assert tensor_core_winograd(request) is not None
    assert tensor_core_winograd(replace(request, constants=frozenset())) is None
    assert tensor_core_winograd(replace(request, shared_constants=request.constants)) is None
    assert tensor_core_winograd(replace(request, winograd=False)) is None
    # eight bits are too few for transformed patches
    assert tensor_core_winograd(requested(family, "bfloat16")) is None


def test_packed_weights_are_as_many_bytes() -> None:
    # the plan counts those that the model has
    scheduled = tensor_core_winograd(requested(convolution((1, 64, 56, 56), (80, 64, 3, 3), padding=1)))
    assert scheduled is not None
    [(position, packing)] = scheduled.packings
    weights = np.zeros((80, 64, 3, 3), np.float16)
    packed = packing.apply(weights)
    assert packed.nbytes == weights.nbytes
    assert packed.shape == tuple(int(e) for e in scheduled.function.params[position].shape)


def test_channels_are_split_where_images_are_small() -> None:
    gpu = gpu_named("rtx-3090")
    small, large = (
        read_half_convolution(requested(convolution((1, 512, side, side), (512, 512, 3, 3), padding=1)))
        for side in (14, 128)
    )
    assert small is not None and choose(small.conv, gpu).parts > 1
    assert large is not None and choose(large.conv, gpu).parts == 1
