"""Profiles of the machines that plans are made for: a GPU, a CPU and the link between them."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hybridc.errors import UsageError
from hybridc.ir import Device

DEFAULT_MACHINE = "laptop-4gb"
_PROFILES = Path(__file__).parent / "machines"
_MAY_BE_ZERO = frozenset({"launch_us", "latency_us"})


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


@dataclass(frozen=True, slots=True)
class Link:
    """What copies between host and GPU memory cost, from pinned memory."""

    h2d_gb_s: float
    d2h_gb_s: float
    latency_us: float


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU, one CPU, one link."""

    name: str
    gpu: Processor
    cpu: Processor
    link: Link
    source: str = ""
    """Where the figures come from."""

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
            f"there is no machine profile {text!r}",
            remedy=f"{hint}known are {', '.join(machine_names())}, or give the path of a .json file",
        )
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError("HC541", f"cannot read the machine profile: {reason}", where=text) from None
    return machine_from_json(data, where=text)


def machine_from_json(data: Any, where: str = "") -> Machine:
    """Check every value of a profile and build it. Raises UsageError HC541 naming the first wrong one."""
    _check_keys(data, ("name", "gpu", "cpu", "link"), ("source",), where)
    return Machine(
        name=_text(data["name"], f"{where}: name"),
        gpu=_processor(data["gpu"], f"{where}: gpu"),
        cpu=_processor(data["cpu"], f"{where}: cpu"),
        link=_link(data["link"], f"{where}: link"),
        source=_text(data.get("source", ""), f"{where}: source"),
    )


def machine_to_json(machine: Machine) -> dict[str, Any]:
    """The profile as plain JSON values; `machine_from_json` is its inverse."""
    return asdict(machine)


def _processor(data: Any, where: str) -> Processor:
    _check_keys(data, tuple(f.name for f in fields(Processor)), (), where)
    memory = data["memory_bytes"]
    if not isinstance(memory, int) or isinstance(memory, bool) or memory <= 0:
        what = f"{memory!r} is not a positive whole number of bytes"
        raise UsageError("HC541", what, where=f"{where}.memory_bytes")
    name = _text(data["name"], f"{where}.name")
    peak, bandwidth, launch = (
        _number(data, k, where) for k in ("peak_gflops", "bandwidth_gb_s", "launch_us")
    )
    return Processor(name, peak, bandwidth, launch, memory)


def _link(data: Any, where: str) -> Link:
    names = tuple(f.name for f in fields(Link))
    _check_keys(data, names, (), where)
    return Link(*(_number(data, key, where) for key in names))


def _check_keys(data: Any, required: tuple[str, ...], optional: tuple[str, ...], where: str) -> None:
    if not isinstance(data, dict):
        raise UsageError("HC541", f"expected an object with {', '.join(required)}", where=where)
    for key in required:
        if key not in data:
            raise UsageError("HC541", f"{key!r} is missing", where=where)
    known = (*required, *optional)
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise UsageError(
                "HC541",
                f"unknown key {key!r}",
                where=where,
                remedy=f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}",
            )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError("HC541", f"{value!r} is not a text", where=where)
    return value


def _number(data: dict[str, Any], key: str, where: str) -> float:
    value = data[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UsageError("HC541", f"{value!r} is not a number", where=f"{where}.{key}")
    if value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
        raise UsageError("HC541", f"{value!r} is not positive", where=f"{where}.{key}")
    return float(value)
