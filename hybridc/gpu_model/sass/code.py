"""SASS, the machine code of NVIDIA GPUs, as `nvdisasm` prints it with its encodings.

The encodings carry what the compiler decided about scheduling: how many cycles to wait after an
instruction, and which of six scoreboards it sets and waits for (Jia et al., "Dissecting the NVIDIA Volta GPU
architecture via microbenchmarking", arXiv 1804.06826, section 2).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hybridc.errors import DeviceError
from hybridc.scratch import scratch_folder

NO_SCOREBOARD = 7
"""What the encoding has in place of a scoreboard's number where none is set."""

_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_ENCODING = r"/\* (0x[0-9a-f]{16}) \*/"
_LINES = re.compile(
    r"^\.text\.(?P<kernel>[^\s:]+):"
    r"|^(?P<label>\.L_x?_?\w+):"
    r"|^\s+/\*(?P<address>[0-9a-f]{4,6})\*/\s+(?P<text>[^\n]*?)\s*;?\s+"
    + _ENCODING
    + r"\s+"
    + _ENCODING.replace("(", "(?P<schedule>", 1),
    re.MULTILINE,
)
_LABEL = re.compile(r"`\((\.L\w+)\)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a kernel."""

    index: int
    """Its place in the kernel, from 0."""
    opcode: str
    """Without modifiers, such as `LDG`."""
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str = ""
    """Such as `P0` or `!P0`; empty: always executed."""
    target: int | None = None
    """Index of the instruction that it may jump to."""
    stall: int = 1
    """Cycles before the warp's next instruction."""
    write_scoreboard: int = NO_SCOREBOARD
    """Released when the result is there."""
    read_scoreboard: int = NO_SCOREBOARD
    """Released when the operands have been read."""
    waits_for: int = 0
    """Bit s: it is not issued before scoreboard s is released."""
    reuse: int = 0
    """Bit s: source s stays in the operand cache."""

    @property
    def bytes(self) -> int:
        """Bytes that a thread reads or writes, if it accesses memory."""
        if self.opcode == "LDSM":
            return 16  # each lane names a row of eight 16-bit elements
        return next((_BYTES[m] for m in self.modifiers if m in _BYTES), 4)

    def __str__(self) -> str:
        name = ".".join((self.opcode, *self.modifiers))
        return f"{'@' + self.predicate + ' ' if self.predicate else ''}{name} {', '.join(self.operands)}"


Code = tuple[Instruction, ...]
"""A kernel's instructions in the order of their addresses."""


def disassemble(cubin: bytes) -> dict[str, Code]:
    """The kernels of a cubin by (mangled) name. Raises DeviceError HC432 without `nvdisasm`."""
    with scratch_folder("hybridc-sass-") as folder:
        path = folder / "kernels.cubin"
        path.write_bytes(cubin)
        command = [_nvdisasm(), "--print-code", "--print-instruction-encoding", str(path)]
        return parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@cache
def _nvdisasm() -> str:
    """Path of the disassembler: of the wheel nvidia-cuda-nvdisasm, or of a CUDA toolkit."""
    spec = find_spec("nvidia")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    folders = [Path(root) / "cu13" / "bin" for root in roots]
    folders += [Path(sys.prefix) / "bin", *map(Path, os.environ.get("PATH", "").split(os.pathsep))]
    found = shutil.which("nvdisasm", path=os.pathsep.join(map(str, folders)))
    if found is None:
        raise DeviceError("HC432", "nvdisasm was not found", remedy="pip install 'hybridc[bench]'")
    return found


def parse(text: str) -> dict[str, Code]:
    """Kernels by name from what `nvdisasm --print-code --print-instruction-encoding` prints."""
    kernels: dict[str, list[re.Match[str]]] = {}
    labels: dict[str, int] = {}
    current: list[re.Match[str]] = []
    for match in _LINES.finditer(text):
        if match["kernel"]:
            current = kernels.setdefault(match["kernel"], [])
        elif match["label"]:
            labels[match["label"]] = len(current)
        else:
            current.append(match)
    return {name: tuple(_instructions(lines, labels)) for name, lines in kernels.items()}


def _instructions(lines: list[re.Match[str]], labels: Mapping[str, int]) -> Iterator[Instruction]:
    for index, line in enumerate(lines):
        text, encoding = line["text"].strip("{} "), int(line["schedule"], 16)
        predicate = ""
        if text.startswith("@"):
            predicate, text = text[1:].split(None, 1)
        head, _, rest = text.partition(" ")
        opcode, *modifiers = head.split(".")
        label = _LABEL.search(rest)
        yield Instruction(
            index,
            opcode,
            tuple(modifiers),
            tuple(operand.strip() for operand in rest.split(",")) if rest.strip() else (),
            predicate,
            labels.get(label[1]) if label else None,
            stall=encoding >> 41 & 15,
            write_scoreboard=encoding >> 46 & 7,
            read_scoreboard=encoding >> 49 & 7,
            waits_for=encoding >> 52 & 63,
            reuse=encoding >> 58 & 15,
        )
