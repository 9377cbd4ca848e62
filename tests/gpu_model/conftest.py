"""Small kernels whose counts are known, as machine code that needs no tools to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridc.gpu_model.kernel import Kernel
from hybridc.gpu_model.sass.code import parse
from hybridc.gpu_model.sass.cubin import Parameter, Resources

DATA = Path(__file__).parent / "data"
POINTER, NUMBER = 8, 4
PARAMETERS = {
    "copy": (POINTER, POINTER),
    "strided": (POINTER, POINTER),
    "guarded": (POINTER, POINTER, NUMBER),
    "product": (POINTER, POINTER, POINTER, NUMBER),
    "transpose": (POINTER, POINTER),
}
SHARED = {"product": 8192, "transpose": 4096}
REGISTERS = {"copy": 8, "strided": 8, "guarded": 8, "product": 24, "transpose": 12}
BANK = 0x160
"""Offset of the first parameter on sm_86."""


@pytest.fixture(scope="session")
def kernels() -> dict[str, Kernel]:
    """Kernels of data/kernels.cu for sm_86."""
    codes = parse((DATA / "kernels.sass").read_text())
    found = {}
    for name, sizes in PARAMETERS.items():
        offsets = [BANK + 8 * number for number in range(len(sizes))]
        parameters = tuple(map(Parameter, offsets, sizes))
        resources = Resources(REGISTERS[name], SHARED.get(name, 0), 0, parameters)
        found[name] = Kernel(name, codes[name], resources)
    return found
