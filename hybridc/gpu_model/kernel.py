"""A compiled kernel and one launch of it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from hybridc.errors import UsageError
from hybridc.gpu_model.sass.code import Code, disassemble
from hybridc.gpu_model.sass.cubin import Parameter, Resources, read_resources
from hybridc.gpu_model.sass.interpreter import Launch

_BUFFER_SPACING = 1 << 40
"""Between the addresses that buffers are taken to lie at: no two share a cache line."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """An argument that is the address of so many bytes."""

    size_bytes: int


Argument = Buffer | int | float


@dataclass(frozen=True, slots=True)
class Kernel:
    """Machine code and resources of one kernel."""

    name: str
    code: Code
    resources: Resources


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel, how it is launched, and how many bytes it can reach."""

    kernel: Kernel
    launch: Launch
    buffer_bytes: int
    """Of all buffers together; 0: not known."""
    dynamic_shared_bytes: int = 0

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return self.kernel.resources.shared_bytes + self.dynamic_shared_bytes


def kernels_of(cubin: bytes) -> dict[str, Kernel]:
    """The kernels of a cubin by (mangled) name. Raises DeviceError HC432 without `nvdisasm`."""
    resources, codes = read_resources(cubin), disassemble(cubin)
    return {name: Kernel(name, codes[name], resources[name]) for name in resources}


def find_kernel(kernels: dict[str, Kernel], name: str) -> Kernel:
    """By its name, or by a part that only its name has. Raises UsageError HC544 if there is no such
    kernel."""
    found = [kernels[name]] if name in kernels else [kernels[full] for full in kernels if name in full]
    if len(found) != 1:
        what = (
            f"{len(found)} kernels have {name!r} in their name" if found else f"no kernel is named {name!r}"
        )
        raise UsageError("HC544", what, remedy=f"choose from {', '.join(sorted(kernels))}")
    return found[0]


def call(
    kernel: Kernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    arguments: Sequence[Argument],
    dynamic_shared_bytes: int = 0,
) -> Call:
    """One launch. Arguments are in the order of the kernel's parameters.

    Raises UsageError HC545 if they are not as many as the parameters.
    """
    parameters = kernel.resources.parameters
    if len(arguments) != len(parameters):
        what = f"the kernel has {len(parameters)} parameters, not {len(arguments)}"
        raise UsageError("HC545", what, where=kernel.name)
    constants: dict[int, int] = {}
    for number, (parameter, argument) in enumerate(zip(parameters, arguments, strict=True)):
        constants |= _words(parameter, argument, (number + 1) * _BUFFER_SPACING)
    buffer_bytes = sum(a.size_bytes for a in arguments if isinstance(a, Buffer))
    return Call(kernel, Launch(grid, block, constants), buffer_bytes, dynamic_shared_bytes)


def _words(parameter: Parameter, argument: Argument, address: int) -> dict[int, int]:
    """The words of the constant bank that hold an argument."""
    if isinstance(argument, Buffer):
        content = struct.pack("<Q", address)
    elif isinstance(argument, float):
        content = struct.pack({2: "<e", 4: "<f", 8: "<d"}[parameter.size_bytes], argument)
    else:
        content = argument.to_bytes(parameter.size_bytes, "little", signed=argument < 0)
    content = content.ljust(-(-parameter.size_bytes // 4) * 4, b"\0")
    return {
        parameter.offset + place: int.from_bytes(content[place : place + 4], "little")
        for place in range(0, len(content), 4)
    }
