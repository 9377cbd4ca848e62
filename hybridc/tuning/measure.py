"""Time single scheduled functions on this machine, on buffers that no cache holds any more."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 only after this import
import numpy as np
import tvm

from hybridc.passes.lower.lower import llvm_target
from hybridc.runtime.libraries import limit_threads, load_runtime
from hybridc.runtime.tiles import enable_amx
from hybridc.schedules.cpu.math.intrinsics import install as install_vector_functions
from hybridc.schedules.rule import Scheduled
from hybridc.targets import Isa

CACHE_BYTES = 1 << 27
"""Calls rotate through this many bytes of arguments, more than the last-level cache of most processors: in a
network, too, a kernel finds its weights in memory and not in a cache."""
LEAST_SET_BYTES = 1 << 17
"""Smaller arguments do rotate through a cache: making thousands of tensors would take too long."""
_LEAST_RUNS = 5
_SECONDS_PER_VERSION = 0.1

Slot = tuple[int, str, int]
"""Position of a parameter, its dtype, and the number of a set of arguments."""


def use_threads(count: int) -> None:
    """Let kernels called from this thread run on `count` threads, as in a session."""
    load_runtime(cuda=False)
    limit_threads(count)


class Arguments:
    """Argument tensors for versions of one function, which share memory: packed weights differ in shape only.

    Floats are near one, which stays finite whatever is computed. Integers are below `index_limit`: zero by
    default, a valid index of anything. They lie in the memory of `device`, by default the CPU's.
    """

    def __init__(
        self, scheduled: Scheduled, index_limit: int = 1, device: tvm.runtime.Device | None = None
    ) -> None:
        self._sets = _sets(scheduled)
        random = np.random.default_rng(0)
        self._floats, self._integers = (
            random.uniform(0.5, 1.5, 1 << 16),
            random.integers(index_limit, size=1 << 16),
        )
        self._device = device
        self._memory: dict[Slot, tvm.runtime.Tensor] = {}

    def sets_of(self, scheduled: Scheduled) -> list[list[tvm.runtime.Tensor]]:
        """Sets of one tensor for each parameter, more of them than caches hold."""
        return [
            [
                self._tensor((position, dtype, number), shape)
                for position, (shape, dtype) in enumerate(_parameters(scheduled))
            ]
            for number in range(self._sets)
        ]

    def _tensor(self, slot: Slot, shape: tuple[int, ...]) -> tvm.runtime.Tensor:
        """A view of the slot's memory, made a little larger than now needed: versions pad differently."""
        size, dtype = math.prod(shape), slot[1]
        if slot not in self._memory or self._memory[slot].numel() < size:
            values = self._floats if dtype.startswith(("float", "bfloat")) else self._integers
            array = np.resize(values.astype(dtype), size + size // 4)
            self._memory[slot] = tvm.runtime.tensor(array, self._device)
        return self._memory[slot]._create_view(shape, dtype)


def compiled(scheduled: Scheduled, isa: Isa) -> Callable[..., None]:
    """The scheduled function as machine code, for tensors on the CPU."""
    install_vector_functions()
    enable_amx(isa.cpu_flags)
    function = scheduled.function.with_attr("global_symbol", "main")
    return tvm.compile(tvm.IRModule({"main": function}), target=llvm_target(isa))["main"]


@dataclass(frozen=True, slots=True)
class TimedKernel:
    """A compiled function, and the sets of arguments that its calls take in turn."""

    call: Callable[..., None]
    argument_sets: Sequence[Sequence[tvm.runtime.Tensor]]

    def seconds(self, turn: int) -> float:
        """Time of one call."""
        tensors = self.argument_sets[turn % len(self.argument_sets)]
        start = time.perf_counter()
        self.call(*tensors)
        return time.perf_counter() - start


def call_times_ms(kernels: Sequence[TimedKernel], seconds: float) -> list[list[float]]:
    """Milliseconds of each kernel's calls. They are called in turn, so that a disturbance meets them all."""
    for turn, kernel in enumerate(kernels):
        kernel.seconds(turn)
    times: list[list[float]] = [[] for _ in kernels]
    end = time.perf_counter() + seconds
    turn = 0
    while len(times[-1]) < _LEAST_RUNS or time.perf_counter() < end:
        for kernel, own in zip(kernels, times, strict=True):
            own.append(kernel.seconds(turn) * 1e3)
            turn += 1
    return times


class Measurer:
    """Times versions of one function against each other, on the threads that a session will have."""

    def __init__(self, isa: Isa, threads: int) -> None:
        self._isa = isa
        self._threads = threads

    def __call__(self, versions: Iterable[Scheduled], expired: Callable[[], bool]) -> list[float]:
        """Milliseconds of the versions; only of the first few, but two, once time has expired.

        They are lower quartiles: the machine is seldom as quiet while a user compiles as for a benchmark. The
        fastest version has to prove itself twice: among many noisy times the least one flatters.
        """
        use_threads(self._threads)
        kernels: list[TimedKernel] = []
        arguments: Arguments | None = None
        for version in versions:
            arguments = arguments or Arguments(version)
            kernels.append(TimedKernel(compiled(version, self._isa), arguments.sets_of(version)))
            if len(kernels) >= 2 and expired():
                break
        times = _quartiles_ms(kernels)
        best = times.index(min(times))
        if best > 0:
            first_again, best_again = _quartiles_ms([kernels[0], kernels[best]])
            times[best] = max(times[best], times[0] * best_again / first_again)
        return times


def arguments_bytes(scheduled: Scheduled) -> int:
    """Memory that `Arguments` takes for a function, about."""
    return _set_bytes(scheduled) * _sets(scheduled) * 5 // 4


def _set_bytes(scheduled: Scheduled) -> int:
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in _parameters(scheduled))


def _sets(scheduled: Scheduled) -> int:
    return math.ceil(CACHE_BYTES / max(_set_bytes(scheduled), LEAST_SET_BYTES))


def _quartiles_ms(kernels: Sequence[TimedKernel]) -> list[float]:
    times = call_times_ms(kernels, _SECONDS_PER_VERSION * len(kernels))
    return [statistics.quantiles(own)[0] for own in times]


def _parameters(scheduled: Scheduled) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(int(e) for e in p.shape), str(p.dtype)) for p in scheduled.function.params]
