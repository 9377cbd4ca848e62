"""Profiles of the machines that plans are made for: a GPU, a CPU and the link between them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from hybridc.errors import UsageError
from hybridc.ir import Device
from hybridc.ir.graph import FAMILIES
from hybridc.json_values import JsonValueError, number, text

T = TypeVar("T")

DEFAULT_MACHINE = "laptop-4gb"
_PROFILES = Path(__file__).parent / "machines"
_MAY_BE_ZERO = frozenset({"launch_us", "latency_us"})
_TENSOR_TYPES = ("float16", "bfloat16", "tf32", "int8")
GRAPH_LAUNCH_US = 0.6
"""Of each of a chain of kernels in a CUDA graph. Kernels that do nothing take 0.58 us each on an RTX 5070 Ti
Laptop (github.com/ahrefs/ocannl/issues/488), where launches one by one take 6.4."""
BF16_SPEEDUP = 1.75
"""Of packed lanes of bf16 on vectors (`vdpbf16ps`) over multiply-adds of floats, as measured on Zen 4."""
_PROCESSOR_NUMBERS = ("peak_gflops", "bandwidth_gb_s", "launch_us")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a processor's peak and of its bandwidth that kernels of a family reach.

    `compute` may exceed one: the work counted is that of the plain algorithm, and Winograd's does less.
    """

    compute: float = 1.0
    memory: float = 1.0


FULL_EFFICIENCY = Efficiency()


@dataclass(frozen=True, slots=True)
class Chip:
    """How a GPU is built, as far as `hybridc.gpu_model` needs it."""

    architecture: str
    """Such as `sm_86`."""
    multiprocessors: int
    clock_ghz: float
    """Boost clock."""
    l2_bytes: int
    tensor_gflops: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Peaks of the tensor cores without sparsity, 1e9 operations a second, by type: `float16`, `bfloat16` and
    `tf32` with sums in float32, `int8`. Types that are left out they do not multiply."""

    @property
    def tensor_multiplies(self) -> float:
        """fp16 multiply-adds with float32 sums that a quarter of a multiprocessor starts in a cycle."""
        return self._started("float16")

    @property
    def integer_multiplies(self) -> float:
        """The same of 8-bit integers with int32 sums."""
        return self._started("int8")

    def _started(self, dtype: str) -> float:
        quarters = 4 * self.multiprocessors
        return self.tensor_gflops.get(dtype, 0.0) / (2 * quarters * self.clock_ghz)


@dataclass(frozen=True, slots=True)
class Processor:
    """Speeds that a kernel's time is predicted from."""

    name: str
    peak_gflops: float
    """Single precision, 1e9 operations a second; a fused multiply-add counts as two."""
    bandwidth_gb_s: float
    """Of its memory, 1e9 bytes a second."""
    launch_us: float
    """Time from one kernel's end to the next one's begin."""
    memory_bytes: int
    efficiencies: Mapping[str, Efficiency] = field(default_factory=dict, hash=False)
    """By family of kernels; families that are left out reach the peaks. `machines/typical.py` adds them."""
    chip: Chip | None = None
    """Of a GPU. None: not known."""
    shared_gb_s: float | None = None
    """What kernels and copies that run at once reach of its memory together, 1e9 bytes a second. None: its
    bandwidth, of a data sheet the share of it that `machines/typical.py` says."""

    bf16_speedup: float | None = None
    """Of packed lanes of bf16 over multiply-adds of floats, both on vectors of a CPU: what the peaks of such
    instructions are to one another. None: not known."""

    @property
    def next_launch_us(self) -> float:
        """Time between launches of one kernel, which nothing comes between: they are in one CUDA graph."""
        return min(self.launch_us, GRAPH_LAUNCH_US)

    @property
    def together_gb_s(self) -> float:
        """What kernels and copies that run at once reach of its memory."""
        return self.shared_gb_s or self.bandwidth_gb_s

    def efficiency(self, family: str) -> Efficiency:
        return self.efficiencies.get(family, FULL_EFFICIENCY)


@dataclass(frozen=True, slots=True)
class Link:
    """What copies between host and GPU memory cost, from pinned memory."""

    h2d_gb_s: float
    d2h_gb_s: float
    latency_us: float
    both_directions: float = 1.0
    """Share of its bandwidth that each direction keeps while copies run in both."""


@dataclass(frozen=True, slots=True)
class Network:
    """What messages between the ranks of a training job cost, as every rank sees them (Hockney's model)."""

    latency_us: float = 1.5
    gb_s: float = 12.5
    """1e9 bytes a second. The defaults are what vendors state of networks of 100 Gb/s."""

    def message_us(self, size_bytes: float) -> float:
        """Of one message between two ranks."""
        return self.latency_us + size_bytes / (1e3 * self.gb_s)

    def all_reduce_us(self, size_bytes: int, ranks: int) -> float:
        """Of one bucket: two phases of N - 1 messages, each with an N-th of the bytes.

        The latencies of a phase's messages follow one another at worst.
        """
        return 2 * (ranks - 1) * self.message_us(size_bytes / ranks)

    def reduce_us(self, most_bytes: int, ranks: int) -> float:
        """Of one bucket whose sums each only one rank needs: it gets N - 1 messages, one after the other.

        `most_bytes` are those that the rank adds up which has most to add up.
        """
        return (ranks - 1) * self.message_us(most_bytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU, one CPU, one link."""

    name: str
    gpu: Processor
    cpu: Processor
    link: Link
    source: str = ""
    """Where the figures come from."""
    network: Network | None = None
    """To other machines like it. None: not known."""
    measured_us: Mapping[tuple[str, Device], float] = field(default_factory=dict, hash=False)
    """Times of single functions of the graph at hand, by name and device, which count instead of what the
    speeds predict. No part of a profile."""
    estimated_us: Mapping[tuple[str, Device], float] = field(default_factory=dict, hash=False)
    """Likewise times by the model of the GPU, of functions without a measured one."""

    def processor(self, device: Device) -> Processor:
        return self.gpu if device is Device.GPU else self.cpu


def machine_names() -> tuple[str, ...]:
    """Names of the profiles that come with hybridc."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.json")))


def load_machine(name_or_path: str | Path = DEFAULT_MACHINE) -> Machine:
    """Read a profile: one that comes with hybridc by its name, or any by a path that ends in `.json`.

    Raises UsageError HC540 if there is none of that name and HC541 if it is not a profile.
    """
    text = str(name_or_path)
    path = Path(text) if text.endswith(".json") else _PROFILES / f"{text}.json"
    if not text.endswith(".json") and text not in machine_names():
        close = difflib.get_close_matches(text, machine_names(), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(
            "HC540",
            f"unknown machine profile {text!r}",
            remedy=f"{hint}choose from {', '.join(machine_names())}, or give the path of a .json file",
        )
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _wrong(f"cannot read the machine profile: {reason}", text) from None
    return machine_from_json(data, where=text)


def gpu_named(name: str) -> Processor:
    """The GPU of a profile, by the profile's name, path or any part of the GPU's own name that is not
    another's.

    Raises UsageError HC540 if there is none, or more than one, and HC541 as `load_machine` does.
    """
    if name.endswith(".json") or name in machine_names():
        return load_machine(name).gpu
    gpus = {load_machine(profile).gpu.name: load_machine(profile).gpu for profile in machine_names()}
    found = [gpu for full, gpu in gpus.items() if _plain(name) in _plain(full)]
    whole = [gpu for gpu in found if _plain(gpu.name).endswith(_plain(name))]
    if len(found) != 1 and len(whole) != 1:
        what = f"{len(found)} GPUs of the profiles have {name!r} in their name"
        raise UsageError("HC540", what, remedy=f"choose from {', '.join(sorted(gpus))}")
    return (whole if len(whole) == 1 else found)[0]


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def machine_from_json(data: Any, where: str = "") -> Machine:
    """Check every value of a profile and build it. Raises UsageError HC541 naming the first wrong one."""
    _check_keys(data, ("name", "gpu", "cpu", "link"), ("source", "network"), where)
    return Machine(
        name=_text(data["name"], f"{where}: name"),
        gpu=_processor(data["gpu"], f"{where}: gpu"),
        cpu=_processor(data["cpu"], f"{where}: cpu"),
        link=_link(data["link"], f"{where}: link"),
        source=_text(data.get("source", ""), f"{where}: source"),
        network=_network(data["network"], f"{where}: network") if "network" in data else None,
    )


def machine_to_json(machine: Machine) -> dict[str, Any]:
    """The profile as plain JSON values; `machine_from_json` is its inverse."""
    data = asdict(machine)
    del data["measured_us"], data["estimated_us"]
    if machine.network is None:
        del data["network"]
    for processor in (data["gpu"], data["cpu"]):
        for optional in ("chip", "shared_gb_s", "bf16_speedup"):
            if processor[optional] is None:
                del processor[optional]
    return data


def _wrong(
    what: str, where: str, remedy: str = "compare with the output of `hybridc machine show --json`"
) -> UsageError:
    return UsageError("HC541", what, where=where, remedy=remedy)


def _processor(data: Any, where: str) -> Processor:
    required = ("name", *_PROCESSOR_NUMBERS, "memory_bytes")
    _check_keys(data, required, ("efficiencies", "chip", "shared_gb_s", "bf16_speedup"), where)
    memory = _whole(data, "memory_bytes", where)
    name = _text(data["name"], f"{where}.name")
    peak, bandwidth, launch = (_number(data, key, where) for key in _PROCESSOR_NUMBERS)
    efficiencies = _efficiencies(data.get("efficiencies", {}), f"{where}.efficiencies")
    chip = _chip(data["chip"], f"{where}.chip") if "chip" in data else None
    together, speedup = (
        _number(data, name, where) if name in data else None for name in ("shared_gb_s", "bf16_speedup")
    )
    return Processor(name, peak, bandwidth, launch, memory, efficiencies, chip, together, speedup)


def _chip(data: Any, where: str) -> Chip:
    _check_keys(data, ("architecture", "multiprocessors", "clock_ghz", "l2_bytes"), ("tensor_gflops",), where)
    tensor = data.get("tensor_gflops", {})
    _check_keys(tensor, (), _TENSOR_TYPES, f"{where}.tensor_gflops")
    return Chip(
        _text(data["architecture"], f"{where}.architecture"),
        _whole(data, "multiprocessors", where),
        _number(data, "clock_ghz", where),
        _whole(data, "l2_bytes", where),
        {name: _number(tensor, name, f"{where}.tensor_gflops") for name in tensor},
    )


def _whole(data: dict[str, Any], key: str, where: str) -> int:
    value = data[key]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        unit = " of bytes" if key.endswith("bytes") else ""
        raise _wrong(f"{value!r} is not a positive whole number{unit}", f"{where}.{key}")
    return value


def _efficiencies(data: Any, where: str) -> dict[str, Efficiency]:
    _check_keys(data, (), FAMILIES, where)
    return {family: _efficiency(shares, f"{where}.{family}") for family, shares in data.items()}


def _efficiency(data: Any, where: str) -> Efficiency:
    names = tuple(f.name for f in fields(Efficiency))
    _check_keys(data, names, (), where)
    return Efficiency(*(_number(data, name, where) for name in names))


def _link(data: Any, where: str) -> Link:
    required = ("h2d_gb_s", "d2h_gb_s", "latency_us")
    _check_keys(data, required, ("both_directions",), where)
    h2d, d2h, latency = (_number(data, key, where) for key in required)
    share = _number({"both_directions": 1.0} | data, "both_directions", where)
    if share > 1:
        raise _wrong(
            f"{share!r} is not a fraction of the bandwidth between 0 and 1", f"{where}.both_directions"
        )
    return Link(h2d, d2h, latency, share)


def _network(data: Any, where: str) -> Network:
    names = ("latency_us", "gb_s")
    _check_keys(data, names, (), where)
    return Network(*(_number(data, name, where) for name in names))


def _check_keys(data: Any, required: tuple[str, ...], optional: tuple[str, ...], where: str) -> None:
    if not isinstance(data, dict):
        raise _wrong(f"expected an object with {', '.join(required or optional)}", where)
    for key in required:
        if key not in data:
            raise _wrong(f"{key!r} is missing", where)
    known = (*required, *optional)
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise _wrong(
                f"unknown key {key!r}",
                where,
                f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}",
            )


def _text(value: Any, where: str) -> str:
    return _checked(text, value, where)


def _number(data: dict[str, Any], key: str, where: str) -> float:
    value = _checked(number, data[key], f"{where}.{key}")
    if value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
        raise _wrong(f"{value!r} is not positive", f"{where}.{key}")
    return float(value)


def _checked(read: Callable[[Any], T], value: Any, where: str) -> T:
    try:
        return read(value)
    except JsonValueError as error:
        raise _wrong(error.what, where) from None
