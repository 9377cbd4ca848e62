"""From timers to a machine profile: peaks first, then what kernels of each family reach of them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import replace

from hybridc.calibrate.fit import efficiencies, sample
from hybridc.calibrate.link import LARGE_BYTES, measure_link, opened
from hybridc.calibrate.peaks import bf16_speedup
from hybridc.calibrate.samples import Subject, subjects
from hybridc.calibrate.sharing import Copies, LinkCopies, ThreadCopies, shared_gb_s
from hybridc.calibrate.timers import CpuTimer, Timer, elementwise_copy, gpu_identity, gpu_timer
from hybridc.machine import Link, Machine, Processor, load_machine
from hybridc.progress import Progress
from hybridc.targets import Target
from hybridc.version import __version__

_TINY_ELEMENTS = 64
_DIGITS = 4

Report = Callable[[int, int], None]
"""Called with (kernels measured so far, kernels in all)."""


def calibrate(
    name: str,
    target: Target,
    threads: int,
    cpu_name: str,
    memory_bytes: int,
    gpu_from: Machine | None,
    progress: Progress,
) -> Machine:
    """Measure this computer, in less than a minute, as a profile called `name`.

    GPU and link are those of `gpu_from` if it is given, and of the default profile where there is no GPU or
    the target has none; what copies cost beside kernels of the CPU is measured with those of a thread then.
    Raises DeviceError HC401 if the CPU lacks the target's instruction set, HC409 for an
    emulated GPU.
    """
    cpu_timer = CpuTimer(target, threads)
    timer = gpu_timer(target) if gpu_from is None and target.has_gpu else None
    progress.stage("schedule samples")
    samples = subjects(target, threads)
    progress.stage("measure CPU")
    cpu = measure_processor(cpu_timer, target, samples, cpu_name, memory_bytes, progress.kernels)
    if target.isa.has_bf16:
        cpu = replace(cpu, bf16_speedup=_rounded(bf16_speedup(target.isa)))
    source = f"Measured by hybridc {__version__} on {datetime.date.today()}, {threads} CPU threads."
    if timer is None:
        other = gpu_from or load_machine()
        progress.stage("measure copies beside kernels")
        cpu = replace(cpu, shared_gb_s=measure_shared(cpu_timer, [ThreadCopies(LARGE_BYTES)]))
        source += f" GPU and link are not measured, but taken from the profile {other.name}: {other.source}"
        return Machine(name, other.gpu, cpu, other.link, source)
    progress.stage("measure GPU")
    gpu_name, gpu_bytes = gpu_identity()
    gpu = measure_processor(timer, target, samples, gpu_name, gpu_bytes, progress.kernels)
    progress.stage("measure link")
    link = _rounded_link(measure_link())
    with opened(LARGE_BYTES) as h2d, opened(LARGE_BYTES, to_host=True) as d2h:
        copies = [LinkCopies(direction, LARGE_BYTES) for direction in (h2d, d2h)]
        cpu = replace(cpu, shared_gb_s=measure_shared(cpu_timer, copies))
        gpu = replace(gpu, shared_gb_s=measure_shared(timer, copies))
    return Machine(name, gpu, cpu, link, source)


def measure_shared(timer: Timer, copies: Sequence[Copies]) -> float:
    """What the memory of a processor reaches for a kernel beside copies, 1e9 bytes a second: the least for
    any of the given ones."""
    return _rounded(min(shared_gb_s(timer.copying(), one) for one in copies))


def measure_processor(
    timer: Timer,
    target: Target,
    subjects: Sequence[Subject],
    name: str,
    memory_bytes: int,
    report: Report = lambda done, total: None,
) -> Processor:
    """Peak, bandwidth, launch, and the efficiencies of the families of `subjects`.

    A launch is the time of a function that computes next to nothing.
    """
    mine = [subject for subject in subjects if timer.device in subject.scheduled]
    before = timer.peak_gflops(), timer.bandwidth_gb_s()
    launch_us = _rounded(timer.us(elementwise_copy(target, timer.device, _TINY_ELEMENTS)))
    times_us = []
    for done, subject in enumerate(mine):
        report(done, len(mine))
        times_us.append(timer.us(subject.scheduled[timer.device]))
    report(len(mine), len(mine))
    after = timer.peak_gflops(), timer.bandwidth_gb_s()  # again, for a disturbance only ever makes them less
    peak, bandwidth = (_rounded(max(values)) for values in zip(before, after, strict=True))
    found = efficiencies(
        sample(
            subject.family,
            subject.flops,
            subject.bytes_moved,
            us,
            peak_gflops=peak,
            bandwidth_gb_s=bandwidth,
            launch_us=launch_us,
        )
        for subject, us in zip(mine, times_us, strict=True)
    )
    return Processor(name, peak, bandwidth, launch_us, memory_bytes, found)


def _rounded_link(link: Link) -> Link:
    """Without the digits that no measurement repeats."""
    return Link(*(_rounded(v) for v in (link.h2d_gb_s, link.d2h_gb_s, link.latency_us, link.both_directions)))


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
