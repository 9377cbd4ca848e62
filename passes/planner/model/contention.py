"""What kernels and copies lose to each other where they share a memory or the link.

Two that run at once and demand more of a memory than it reaches each keep a share r of their speed, the
memory's over the sum of the demands; copies in both directions each keep the share that the profile's link
says. The simulation settles a run one kernel or copy at a time, and what is settled keeps its times. So the
one that is settled later bears the loss of both and keeps r squared, which is 1 - 2 (1 - r) to first order:
no work is lost, and what the lanes get done together is what they would get done by turns. Where several
others are running their shares multiply.

A proven bound stays one. Shorten everything in a run to the time that it takes by itself, from its start
on: it still starts behind all that it follows, no lane does two things at once, and bytes are held for no
longer. So each run with contention has one without it that takes no longer, and no bound of those exceeds
it. A bound of what is replayed may count what lanes lose there on top (`bounds/sharing.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hybridc.ir import Device, Kernel, Lane
from hybridc.machine import Machine
from hybridc.passes.planner.model.cost import kernel_us

_NONE = 0.995
"""From this share on nothing is lost."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What of its speed is kept by a kernel, or by a copy, that is settled while the other one runs."""

    h2d: float = 1.0
    d2h: float = 1.0


ALONE = Shares()


@dataclass(frozen=True, slots=True)
class Contention:
    """The shares of all kernels of a problem, by position; empty where nothing is shared."""

    gpu: tuple[Shares, ...] = ()
    cpu: tuple[Shares, ...] = ()
    link: float = 1.0
    """Of two copies in different directions."""
    gpu_copy: float = 1.0
    cpu_copy: float = 1.0
    """Of what each memory reaches the share that a copy to the GPU demands, at the link's bandwidth."""
    h2d_gb_s: float = 0.0
    """That bandwidth; 0: unknown."""

    @property
    def matters(self) -> bool:
        return self.link < 1 or any(shares != ALONE for shares in (*self.gpu, *self.cpu))

    def of(self, lane: Lane, kernel: int) -> Shares:
        shares = self.gpu if lane is Lane.GPU else self.cpu
        return shares[kernel] if shares else ALONE

    def reordered(self, kernels: Sequence[int]) -> Contention:
        """Of the kernels at these positions."""
        if not self.gpu:
            return self
        gpu, cpu = (tuple(of[k] for k in kernels) for of in (self.gpu, self.cpu))
        return replace(self, gpu=gpu, cpu=cpu)


UNSHARED = Contention()
"""Nothing is lost."""


def contention_of(kernels: Sequence[Kernel], machine: Machine) -> Contention:
    """The shares that the speeds of a machine lead to."""
    up, down = machine.link.h2d_gb_s, machine.link.d2h_gb_s

    def shares(kernel: Kernel, device: Device) -> Shares:
        if device not in kernel.devices:
            return ALONE
        us = kernel_us(kernel, machine, device)
        reached = machine.processor(device).together_gb_s
        demand = min(kernel.bytes_moved / (us * 1e3) if us > 0 else 0.0, reached)
        return Shares(kept(demand, up, reached), kept(demand, down, reached))

    memories = [kept(up, down, machine.processor(device).together_gb_s) for device in Device]
    link = min(_squared(machine.link.both_directions), *memories)
    return Contention(
        tuple(shares(kernel, Device.GPU) for kernel in kernels),
        tuple(shares(kernel, Device.CPU) for kernel in kernels),
        link,
        gpu_copy=min(1.0, up / machine.gpu.together_gb_s),
        cpu_copy=min(1.0, up / machine.cpu.together_gb_s),
        h2d_gb_s=up,
    )


def kept(one_gb_s: float, other_gb_s: float, reached_gb_s: float) -> float:
    """What the one that is settled later keeps of two that demand these bandwidths of a memory.

    One alone gets what it demands: it was timed with that.
    """
    total_gb_s = one_gb_s + other_gb_s
    if not total_gb_s:
        return 1.0
    return _squared(min(1.0, max(one_gb_s, other_gb_s, reached_gb_s) / total_gb_s))


def _squared(share: float) -> float:
    return share * share if share < _NONE else 1.0


@dataclass(frozen=True, slots=True)
class _Settled:
    start_us: float
    end_us: float
    shares: Shares


@dataclass(slots=True)
class SharedLanes:
    """What is settled on each lane of a run, in the order of its times there."""

    contention: Contention
    _is_shared: bool = field(init=False)
    _settled: dict[Lane, list[_Settled]] = field(default_factory=lambda: {lane: [] for lane in Lane})
    _next: dict[tuple[Lane, Lane], int] = field(default_factory=dict)
    """Of the other lane the first that may still be running, seen from a lane."""

    def __post_init__(self) -> None:
        self._is_shared = self.contention.matters

    def settle(self, lane: Lane, kernel: int, start_us: float, us: float) -> float:
        """When a kernel ends, or a copy, for which `kernel` does not matter, that takes `us` by itself.

        Requires: lane by lane with rising starts, none before the end of the one before.
        """
        if not self._is_shared:
            return start_us + us
        is_copy = lane in (Lane.H2D, Lane.D2H)
        own = ALONE if is_copy else self.contention.of(lane, kernel)
        if not is_copy and own == ALONE:
            return start_us + us
        now_us, left_us = start_us, us
        while True:
            rate, until_us = 1.0, float("inf")
            for other in _PARTNERS[lane]:
                running = self._running(lane, other, now_us)
                if running is None:
                    continue
                if running.start_us > now_us:
                    until_us = min(until_us, running.start_us)
                else:
                    until_us = min(until_us, running.end_us)
                    rate *= self._share(lane, other, own, running)
            if left_us <= (until_us - now_us) * rate:
                break
            left_us -= (until_us - now_us) * rate
            now_us = until_us
        end_us = now_us + left_us / rate
        self._settled[lane].append(_Settled(start_us, end_us, own))
        return end_us

    def _running(self, lane: Lane, other: Lane, now_us: float) -> _Settled | None:
        settled, at = self._settled[other], self._next.get((lane, other), 0)
        while at < len(settled) and settled[at].end_us <= now_us:
            at += 1
        self._next[lane, other] = at
        return settled[at] if at < len(settled) else None

    def _share(self, lane: Lane, other: Lane, own: Shares, running: _Settled) -> float:
        kernel = own if lane in (Lane.GPU, Lane.CPU) else running.shares
        copy = other if lane in (Lane.GPU, Lane.CPU) else lane
        if {lane, other} == {Lane.H2D, Lane.D2H}:
            return self.contention.link
        return kernel.h2d if copy is Lane.H2D else kernel.d2h


# kernels share nothing with each other: each device has a memory of its own
_PARTNERS = {
    Lane.GPU: (Lane.H2D, Lane.D2H),
    Lane.CPU: (Lane.H2D, Lane.D2H),
    Lane.H2D: (Lane.GPU, Lane.CPU, Lane.D2H),
    Lane.D2H: (Lane.GPU, Lane.CPU, Lane.H2D),
    Lane.NET: (),
}
