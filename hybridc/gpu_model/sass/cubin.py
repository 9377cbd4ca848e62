"""What a cubin says of its kernels: registers, shared and local memory, and where parameters lie.

A cubin is an ELF file. NVIDIA does not document the sections `.nv.info`; their attributes are those that
`cuobjdump --dump-elf` names.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_LONG_FORM = 4
"""Format of an attribute that is followed by its bytes."""
_RESERVED = ".nv.shared.reserved.0"
_RESERVED_BYTES = 1024
"""What CUDA takes of each block's shared memory; counted with that of the kernels where there is such a
section."""
_PARAMETER_BANK, _FRAME_SIZE, _PARAMETER_INFO, _REGISTERS = 0x0A, 0x11, 0x17, 0x2F


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kernel, in its constant bank."""

    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Resources:
    """What each thread and block of a kernel takes."""

    registers: int
    """Of a thread."""
    shared_bytes: int
    """Of a block, as far as the kernel declares them itself."""
    local_bytes: int
    """Of a thread: spilled registers, and arrays indexed by what only a run knows."""
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    content: bytes


def read_resources(cubin: bytes) -> dict[str, Resources]:
    """Resources of the kernels of a cubin by (mangled) name. Raises ValueError if it is no cubin."""
    sections = {section.name: section for section in _sections(cubin)}
    if ".nv.info" not in sections:
        raise ValueError("not a cubin")
    about = list(_attributes(sections[".nv.info"].content))
    frames, registers = (
        dict(struct.unpack("<II", data) for key, data in about if key == wanted)
        for wanted in (_FRAME_SIZE, _REGISTERS)
    )
    symbols = _symbol_numbers(sections[".symtab"].content, sections[".strtab"].content)
    kernels = {}
    for name in (name.removeprefix(".text.") for name in sections if name.startswith(".text.")):
        if f".nv.info.{name}" not in sections:
            continue  # a device function
        shared = sections.get(f".nv.shared.{name}")
        reserved = _RESERVED_BYTES if _RESERVED in sections else 0
        kernels[name] = Resources(
            registers=registers[symbols[name]],
            shared_bytes=max(0, len(shared.content) - reserved) if shared else 0,
            local_bytes=frames.get(symbols[name], 0),
            parameters=_parameters(sections[f".nv.info.{name}"].content),
        )
    return kernels


def _sections(cubin: bytes) -> Iterator[_Section]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + size * number) for number in range(count)]
    for name, kind, _, _, offset, length, *_ in headers:
        start = headers[names][4] + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        # sections of kind 8 (NOBITS) have a length but nothing in the file: shared memory
        yield _Section(text, bytes(length) if kind == 8 else cubin[offset : offset + length])


def _symbol_numbers(table: bytes, names: bytes) -> dict[str, int]:
    numbers = {}
    for number in range(len(table) // 24):
        (start,) = struct.unpack_from("<I", table, 24 * number)
        numbers[names[start : names.index(b"\0", start)].decode()] = number
    return numbers


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(content):
        form, key, length = struct.unpack_from("<BBH", content, position)
        position += 4
        if form == _LONG_FORM:
            yield key, content[position : position + length]
            position += length


def _parameters(content: bytes) -> tuple[Parameter, ...]:
    attributes = list(_attributes(content))
    bank = next((struct.unpack("<IHH", data)[1] for key, data in attributes if key == _PARAMETER_BANK), 0)
    infos = (struct.unpack("<IHHI", data) for key, data in attributes if key == _PARAMETER_INFO)
    # the size is in the upper bits of the last word
    return tuple(
        Parameter(bank + offset, bits >> 18) for _, _, offset, bits in sorted(infos, key=lambda i: i[1])
    )
