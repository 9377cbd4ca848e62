"""Instruction sets that multiply narrow numbers, and what tests need to know about them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import tirx

from hybridc.passes.lower.lower import llvm_target
from hybridc.schedules.cpu.math.intrinsics import install
from hybridc.schedules.rule import PRECISION, Scheduled
from hybridc.targets import ISAS, Isa, missing_flags

EMULATED = tuple(
    pytest.param(f"{name}_emulated", marks=[] if missing_flags(ISAS[name]) else pytest.mark.slow)
    for name in ("avx512_bf16", "amx")
)
"""Parameters of tests. Where the processor has the instructions, the fast suite is content with these."""
UNIT = 2.0**-9
"""The largest relative error of rounding a normal number to bf16."""


def isa_here(name: str) -> Isa:
    """The instruction set; the test is skipped where this processor lacks it."""
    isa = ISAS[name]
    if missing := missing_flags(isa):
        pytest.skip(f"this processor lacks {', '.join(missing)}")
    return isa


def vectors_here() -> str:
    """The instruction set that shows most about vectors of narrow numbers."""
    return "avx512_bf16_emulated" if missing_flags(ISAS["avx512_bf16"]) else "avx512_bf16"


def in_bf16(function: tirx.PrimFunc) -> tirx.PrimFunc:
    return function.with_attr(PRECISION, "bf16")


def rounded(array: np.ndarray) -> np.ndarray:
    """The nearest bf16 numbers."""
    return array.astype(ml_dtypes.bfloat16).astype(array.dtype)


def assembly(scheduled: Scheduled, isa: Isa) -> str:
    """What LLVM makes of a function, on whatever processor."""
    install()
    module = tvm.IRModule({"main": scheduled.function.with_attr("global_symbol", "main")})
    return str(tvm.compile(module, target=llvm_target(isa)).mod.inspect_source("asm"))


def instructions(text: str) -> list[str]:
    """Mnemonics, in order, without how they are encoded."""
    lines = (line.replace("{vex}", "") for line in text.splitlines() if line.startswith("\t"))
    return [line.split()[0] for line in lines if line.split()]
