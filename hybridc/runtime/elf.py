"""The extent of a shared library's file, for the dynamic linker reads what its tables say and does not ask
whether the file goes on that far: beyond the end the process ends with SIGBUS."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from mmap import mmap

_MAGIC = b"\x7fELF\x02\x01\x01"  # of 64 bits, little-endian, version 1
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SHARED, _X86_64 = 3, 62
_LOADED, _DYNAMIC = 1, 2


def fault_of_library(content: bytes | mmap) -> str | None:
    """Why these bytes are no whole shared library for this processor; None if they are one, or seem so.

    Headers, and where in the file the segments lie, are looked at, and nothing that lies in them.
    """
    if len(content) == 0:
        return "the file is empty"
    if content[: len(_MAGIC)] != _MAGIC or len(content) < _HEADER.size:
        return "it is no ELF file of 64 bits"
    _, kind, machine, _, _, segments_at, _, _, _, segment_bytes, segments, *_ = _HEADER.unpack_from(content)
    if (kind, machine) != (_SHARED, _X86_64):
        return "it is no shared library for x86-64"
    if segment_bytes != _SEGMENT.size or segments_at + segments * segment_bytes > len(content):
        return "its program headers lie outside of the file"
    kinds = set()
    for kind, offset, size in _segments(content, segments_at, segments):
        if offset + size > len(content):
            return f"a segment ends at byte {offset + size:,}, but the file has {len(content):,}"
        kinds.add(kind)
    return None if {_LOADED, _DYNAMIC} <= kinds else "it has no segments to load"


def _segments(content: bytes | mmap, start: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Kind, offset in the file and bytes there, of each."""
    for number in range(count):
        kind, _, offset, _, _, size, _, _ = _SEGMENT.unpack_from(content, start + number * _SEGMENT.size)
        yield kind, offset, size
