"""What this computer has. Nothing here loads a driver."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hybridc.targets import ISAS, cpu_flags, missing_flags

_NVIDIA_VERSION = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Computer:
    """The processor, its memory, and the driver of an NVIDIA GPU."""

    cpu: str
    cores: int
    """Processors that this process may use."""
    isas: tuple[str, ...]
    """Instruction sets that hybridc can compile for and this processor runs."""
    memory_bytes: int
    nvidia_driver: str | None
    """Version of the kernel module; None: there is none."""


def this_computer() -> Computer:
    """Look at the computer that hybridc runs on."""
    flags = cpu_flags()
    return Computer(
        cpu=_first_match(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$") or "unknown",
        cores=len(os.sched_getaffinity(0)),
        isas=tuple(name for name, isa in ISAS.items() if not (isa.is_emulated or missing_flags(isa, flags))),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        nvidia_driver=nvidia_driver(),
    )


def nvidia_driver() -> str | None:
    """Version of the loaded NVIDIA kernel module, or None."""
    return _first_match(_NVIDIA_VERSION, r"Kernel Module\D*?\s(\d[\d.]+)") or (
        "unknown version" if _NVIDIA_VERSION.exists() else None
    )


def _first_match(path: Path, pattern: str) -> str | None:
    try:
        match = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1).strip() if match else None
