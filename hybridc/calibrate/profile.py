"""Times of the functions of one model, which the planner then takes instead of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridc import emulator
from hybridc.calibrate.timers import CpuTimer, Timer, gpu_timer
from hybridc.ir import Device
from hybridc.options import CompileOptions
from hybridc.passes.phases import Profiler
from hybridc.progress import Progress
from hybridc.schedules.rule import Scheduled


def profiler_of(options: CompileOptions, progress: Progress) -> Profiler | None:
    """What measures functions as the options ask for; None if they do not.

    It measures on the CPU, and on the GPU if this computer has one: an emulated one counts as none. Raises
    DeviceError HC401 if the processor cannot run what there is to measure.
    """
    if not options.profile_kernels:
        return None
    timers: list[Timer] = [CpuTimer(options.target, options.cpu_threads)]
    gpu = gpu_timer(options.target) if options.target.has_gpu and not emulator.is_active() else None
    if gpu is not None:
        timers.append(gpu)
    return lambda scheduled: times_us(scheduled, timers, progress)


def times_us(
    scheduled: Mapping[tuple[str, Device], Scheduled], timers: Sequence[Timer], progress: Progress
) -> dict[tuple[str, Device], float]:
    """Every function on every device that has a timer, and the memory for it."""
    timer_of = {timer.device: timer for timer in timers}
    todo = {
        key: made for key, made in scheduled.items() if key[1] in timer_of and timer_of[key[1]].fits(made)
    }
    times = {}
    for done, (key, made) in enumerate(todo.items()):
        progress.kernels(done, len(todo))
        times[key] = timer_of[key[1]].us(made)
    progress.kernels(len(todo), len(todo))
    return times
