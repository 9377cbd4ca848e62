"""Targets: `[cuda[:ARCH,...]+]ISA[,ISA...]`, for example `cuda+avx2`, `cuda:sm_86+avx512`, `avx2,avx512`."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hybridc.errors import DeviceError, UsageError


class DotProductUnit(StrEnum):
    """Instructions that multiply int8 numbers, and some of them bf16, and add up in int32 and float32."""

    INT16 = "int16"
    """`vpmaddwd`, which every processor has: int8 numbers are extended to 16 bits, and a pair multiplied."""
    INT8_VNNI = "int8 vnni"
    """`vpdpbusd`: 8 or 16 sums at a time."""
    VNNI = "vnni"
    """`vdpbf16ps`, too."""
    AMX = "amx"
    """AMX's `tdpbf16ps` and `tdpbusd`: 256 sums at a time."""
    EMULATED_VNNI = "emulated vnni"
    EMULATED_AMX = "emulated amx"
    """The same code with other instructions in their place: slow, to try it where they are missing."""

    @property
    def is_amx(self) -> bool:
        return self in (DotProductUnit.AMX, DotProductUnit.EMULATED_AMX)

    @property
    def has_bf16(self) -> bool:
        return self not in (DotProductUnit.INT16, DotProductUnit.INT8_VNNI)

    @property
    def is_emulated(self) -> bool:
        return self in (DotProductUnit.EMULATED_VNNI, DotProductUnit.EMULATED_AMX)


@dataclass(frozen=True, slots=True)
class Isa:
    """An x86 instruction set as a schedule and LLVM need to know it."""

    name: str
    mcpu: str
    """LLVM's name of the oldest processor that has it."""
    mattr: tuple[str, ...]
    vector_bits: int
    vector_registers: int
    cpu_flags: tuple[str, ...]
    """Flags of /proc/cpuinfo that a processor must have to run it."""
    fma_latency: int = 4
    """Cycles from a multiply-add to its result."""
    fma_ports: int = 2
    """Multiply-adds that begin in a cycle."""
    l1_bytes: int = 1 << 15
    """Data cache of a core: the least among processors that have the instruction set."""
    l2_bytes: int = 1 << 20
    """Second-level cache of a core, as most of them have it."""
    dot_product_unit: DotProductUnit = DotProductUnit.INT16
    """Which instructions multiply low-precision numbers."""

    @property
    def is_emulated(self) -> bool:
        return self.dot_product_unit.is_emulated

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies bf16 numbers."""
        return self.dot_product_unit.has_bf16

    @property
    def has_tiles(self) -> bool:
        """Whether it multiplies tiles of low-precision numbers."""
        return self.dot_product_unit.is_amx

    @property
    def sums_in_flight(self) -> int:
        """Accumulators below which multiply-adds wait for their own results."""
        return self.fma_latency * self.fma_ports

    def lanes(self, dtype_bits: int = 32) -> int:
        """Elements of one vector register."""
        return self.vector_bits // dtype_bits


_AVX2_FLAGS = ("avx", "avx2", "fma", "f16c", "bmi1", "bmi2")
_AVX512_FLAGS = (*_AVX2_FLAGS, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_VNNI_FLAGS = (*_AVX512_FLAGS, "avx512_vnni")
_BF16_FLAGS = (*_VNNI_FLAGS, "avx512_bf16")
_AMX_FLAGS = (*_BF16_FLAGS, "amx_tile", "amx_bf16", "amx_int8")
_ZMM = ("-prefer-256-bit",)
_UNASKED = ("-avx512fp16", "-avxvnni")
"""What LLVM would use of Sapphire Rapids though nobody asks a processor for its flags."""


def _avx512(name: str, mcpu: str, flags: tuple[str, ...], unit: DotProductUnit = DotProductUnit.INT16) -> Isa:
    return Isa(name, mcpu, _ZMM, 512, 32, flags, dot_product_unit=unit)


ISAS = {
    isa.name: isa
    for isa in (
        Isa("avx2", "core-avx2", (), 256, 16, _AVX2_FLAGS),
        Isa(
            "avx2_vnni",
            "core-avx2",
            ("+avxvnni",),
            256,
            16,
            (*_AVX2_FLAGS, "avx_vnni"),
            dot_product_unit=DotProductUnit.INT8_VNNI,
        ),
        _avx512("avx512_bf16_emulated", "skylake-avx512", _AVX512_FLAGS, DotProductUnit.EMULATED_VNNI),
        _avx512("amx_emulated", "skylake-avx512", _AVX512_FLAGS, DotProductUnit.EMULATED_AMX),
        _avx512("avx512", "skylake-avx512", _AVX512_FLAGS),
        _avx512("avx512_vnni", "cascadelake", _VNNI_FLAGS, DotProductUnit.INT8_VNNI),
        _avx512("avx512_bf16", "cooperlake", _BF16_FLAGS, DotProductUnit.VNNI),
        Isa(
            "amx",
            "sapphirerapids",
            (*_ZMM, *_UNASKED),
            512,
            32,
            _AMX_FLAGS,
            l2_bytes=1 << 21,
            dot_product_unit=DotProductUnit.AMX,
        ),
    )
}
"""Each processor takes the last one that it has all flags of."""

DEFAULT_ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
"""The first of each major version from Turing on, the oldest that CUDA 13 compiles for: sm_86 and sm_89 run
the machine code of sm_80. Each costs half of what the first does, and some 40 KB (`codegen/cuda.py`)."""

DEFAULT_THREADS = 8
"""Threads that kernels are scheduled for if none are given and this processor cannot run the target's code:
the cores of a common desktop processor."""


def is_architecture(name: str) -> bool:
    """Whether it is such as `sm_80`, `sm_90a` or `sm_100f`."""
    return re.fullmatch(r"sm_\d{2,3}[af]?", name, re.ASCII) is not None


def architecture_number(name: str) -> int:
    """As NVRTC counts: 80 of `sm_80`, 90 of `sm_90a`."""
    return int(name.strip("sm_af"))


def capability_of(name: str) -> tuple[int, int]:
    """The compute capability, (8, 0) of `sm_80`."""
    return divmod(architecture_number(name), 10)


def oldest(architectures: Sequence[str]) -> str:
    """The one whose code is made for all: PTX of it runs on the others."""
    return min(architectures, key=architecture_number)


def runs_on(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability can load code for `architectures`, with PTX of the oldest.

    Machine code runs on GPUs of its major version and at least its minor one, PTX on all that are not older.
    Code for `sm_90a` runs on no other, that for `sm_100f` on no other major version. CUDA's rules: "Binary
    Compatibility" and "PTX Compatibility" in the CUDA C++ Programming Guide.
    """

    def loads(name: str, is_ptx: bool) -> bool:
        made_for, suffix = capability_of(name), name.lstrip("sm_0123456789")
        if suffix == "a":
            return capability == made_for
        same_major = capability[0] == made_for[0]
        return capability >= made_for and (same_major or (is_ptx and not suffix))

    if not architectures:
        return False
    return loads(oldest(architectures), True) or any(loads(name, False) for name in architectures)


@dataclass(frozen=True, slots=True)
class Target:
    """What code is made for: the CUDA architectures, if any, and the CPU's instruction sets."""

    cuda_architectures: tuple[str, ...]
    isa: Isa
    """Of several the richest."""
    poorer: tuple[Isa, ...] = ()
    """Others that an artifact has code for as well, in the order of `ISAS`: one is chosen at load."""

    @property
    def has_gpu(self) -> bool:
        return bool(self.cuda_architectures)

    @property
    def of_each(self) -> tuple[Target, ...]:
        """One for each instruction set, the richest last."""
        return tuple(Target(self.cuda_architectures, isa) for isa in (*self.poorer, self.isa))

    @property
    def cpu(self) -> str:
        """The part of its name that says for which CPUs."""
        return ",".join(isa.name for isa in (*self.poorer, self.isa))

    def __str__(self) -> str:
        if not self.has_gpu:
            return self.cpu
        if self.cuda_architectures == DEFAULT_ARCHITECTURES:
            return f"cuda+{self.cpu}"
        return f"cuda:{','.join(self.cuda_architectures)}+{self.cpu}"


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature flags of the processor hybridc runs on."""
    try:
        match = re.search(r"^flags\s*:\s*(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return frozenset(match.group(1).split()) if match else frozenset()


def missing_flags(isa: Isa, flags: frozenset[str] | None = None) -> tuple[str, ...]:
    """Flags that `isa` needs and this processor lacks."""
    present = cpu_flags() if flags is None else flags
    return tuple(flag for flag in isa.cpu_flags if flag not in present)


def available_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def default_threads(isa: Isa) -> int:
    """Threads to schedule kernels for when nobody gives a number: as many as a session would use here, or
    `DEFAULT_THREADS` if this processor cannot run `isa`."""
    return DEFAULT_THREADS if missing_flags(isa) else available_threads()


def native_isa() -> Isa:
    """The richest ISA that this processor has. Raises DeviceError HC401 if it has not even AVX2."""
    flags = cpu_flags()
    for isa in reversed(ISAS.values()):
        if not missing_flags(isa, flags):
            return isa
    raise DeviceError(
        "HC401",
        f"this processor lacks {', '.join(missing_flags(ISAS['avx2'], flags))}",
        remedy="hybridc requires at least AVX2",
    )


def parse_target(text: str) -> Target:
    """Read `[cuda[:ARCH,...]+]ISA[,ISA...]`. Raises UsageError HC501 naming what is wrong."""

    def refuse(what: str, word: str = "") -> UsageError:
        offered = [*(name for name, isa in ISAS.items() if not isa.is_emulated), "native"]
        close = difflib.get_close_matches(word, ["cuda", *offered], n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return UsageError(
            "HC501",
            what,
            where=f"target {text!r}",
            remedy=f"{hint}write [cuda[:sm_75,sm_90]+]ISA with ISA one of {', '.join(offered)}, or several"
            " with commas between them",
        )

    gpu_text, plus, isa_text = str(text).rpartition("+")
    architectures: tuple[str, ...] = ()
    if plus:
        kind, colon, archs = gpu_text.partition(":")
        if kind != "cuda":
            raise refuse(f"unknown GPU kind {kind!r}", kind)
        architectures = tuple(archs.split(",")) if colon else DEFAULT_ARCHITECTURES
        for arch in architectures:
            if not is_architecture(arch):
                raise refuse(f"unknown CUDA architecture {arch!r}")
    names = {native_isa().name if name == "native" else name for name in isa_text.split(",")}
    for name in sorted(names - ISAS.keys()):
        if name == "cuda":
            raise refuse("a target needs a CPU instruction set as well")
        raise refuse(f"unknown instruction set {name!r}", name)
    *poorer, richest = (isa for name, isa in ISAS.items() if name in names)
    return Target(architectures, richest, tuple(poorer))
