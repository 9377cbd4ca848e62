"""CUDA kernels on the CPU: from the text that TVM generates to a library the emulated driver loads."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridc.emulator.toolchain import NATIVE_FOLDER, build_library
from hybridc.targets import cpu_flags

_FATBIN_MAGIC = 0xBA55ED50
_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_WORD_MASK = (1 << 64) - 1

# -O1 with the vectoriser compiles in half the time of -O2 and its kernels run as fast. Contraction to
# fused multiply-adds is what a GPU does too. No -ffast-math: NaN must stay visible.
_COMPILE_FLAGS = (
    "-O1",
    "-ftree-vectorize",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
)
_DEVICE_HEADERS = {"hybridc/mma.h": "mma_on_cpu.h", "hybridc/async_copy.h": "async_copy_on_cpu.h"}
"""What stands for the headers of functions that are one instruction each; for a GPU the text is codegen's."""
_COUNTED_FLAGS = (
    *_COMPILE_FLAGS,
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
    "-fno-tree-sra",  # a vector stays one access
    "-DHYBRIDC_COUNTED_KERNELS",
)
"""Of kernels that tell of each access to memory: see native/counting/counted_on_cpu.h."""
_UNIT_CHARACTERS = 128 << 10  # TVM unrolls: one kernel may be 100 kB of text

_DEFINITION = re.compile(
    r'(?:extern\s+"C"\s+)?__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)\s*\{'
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:.*\\\n)*.*$", re.MULTILINE)
_MEETING = re.compile(r"__syncthreads|__syncwarp|__shfl|__activemask|__shared__|wmma::|\bldmatrix_|\bmma_m16")
_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:(?:alignas|__align__)\s*\(\d+\)\s*)?([\w:]+(?:\s+\w+)*?)\s+(\w+)\s*\[\s*\]\s*;"
)
_STATIC_SHARED = re.compile(
    r"__shared__\s+((?:(?:alignas|__align__)\s*\(\d+\)\s*)?)([\w:<>, ]+?)\s+(\w+)\s*((?:\[[^\]]*\])*)\s*;"
)


@dataclass(frozen=True, slots=True)
class _TranslatedKernel:
    """One __global__ function, its shared arrays moved into a struct that the driver allocates."""

    name: str
    shared_members: tuple[str, ...]
    text: str
    needs_fibers: bool

    def definition(self) -> str:
        shared = (
            f"struct {self.name}_shared {{ {' '.join(self.shared_members)} }};\n"
            if self.shared_members
            else ""
        )
        return shared + self.text

    def export(self) -> str:
        size = f"sizeof({self.name}_shared)" if self.shared_members else "0"
        arguments = f'"{self.name}", {size}, {int(self.needs_fibers)}'
        return (
            'extern "C" __attribute__((visibility("default"))) '
            f"emulator::KernelEntry hybridc_kernel_{self.name}() {{ "
            f"return cuda_on_cpu::Kernel<{self.name}>::entry({arguments}); }}\n"
        )


_BIND = (
    'extern "C" __attribute__((visibility("default"), no_sanitize("thread"))) '
    "void hybridc_bind_services(const emulator::BlockServices* given) { cuda_on_cpu::services = given; }\n"
)


def first_kernel_of(function: str) -> str:
    """Name of the first CUDA kernel of a graph's function; those of others have numbers behind it."""
    return f"{function}_gpu_kernel"


def image_key(image: bytes) -> str:
    """Name of a compiled CUDA image (fat binary, cubin or PTX text): 16 hexadecimal digits.

    The emulated driver computes the same 64-bit FNV-1a hash, over 8-byte words, of the image that
    TVM's runtime gives it. Bytes behind the end that the image's own header states do not count.
    """
    data = image[: _image_size(image)]
    data += bytes(-len(data) % 8)
    value = _FNV_OFFSET
    for (word,) in struct.iter_unpack("<Q", data):
        value = (value ^ word) * _FNV_PRIME & _WORD_MASK
    return f"{value:016x}"


def _image_size(image: bytes) -> int:
    """Bytes of the image; twin of image_size in native/image.h."""
    if len(image) >= 16 and struct.unpack_from("<I", image)[0] == _FATBIN_MAGIC:
        header_bytes, body_bytes = struct.unpack_from("<HQ", image, 6)
        return int(header_bytes + body_bytes)
    if len(image) >= 64 and image.startswith(b"\x7fELF"):
        programs_at, sections_at = struct.unpack_from("<QQ", image, 32)
        program_bytes, programs, section_bytes, sections = struct.unpack_from("<4H", image, 54)
        return int(max(programs_at + program_bytes * programs, sections_at + section_bytes * sections))
    end = image.find(b"\0")
    return len(image) if end < 0 else end


def translate(source: str, *, counted: bool = False) -> tuple[str, ...]:
    """C++ translation units for CUDA `source`, each with some of its kernels and all the rest of it.

    If they are to be `counted`, the first has what is called for each access to memory.
    """
    definitions = list(_DEFINITION.finditer(source))
    prologue = source[: definitions[0].start()] if definitions else source
    # A device function that meets others makes every kernel a suspect.
    helpers_meet = bool(_MEETING.search(_DIRECTIVE.sub("", prologue)))
    starts = [match.start() for match in definitions]
    ends = [*starts[1:], len(source)][: len(starts)]  # none for a text without kernels
    kernels = [
        _translate_kernel(match, source[match.end() : end], helpers_meet)
        for match, end in zip(definitions, ends, strict=True)
    ]
    header = '#include "cuda_on_cpu.h"\n'
    if "half" in source or "bfloat16" in source:
        header += '#include "half_on_cpu.h"\n'
    if "wmma" in source:
        header += '#include "tensor_core_on_cpu.h"\n'
    header += "".join(f'#include "{own}"\n' for name, own in _DEVICE_HEADERS.items() if name in source)
    # <mma.h> compiles with nvcc only; kernels become static functions, which cannot be extern "C".
    for name in ("mma.h", *_DEVICE_HEADERS):
        prologue = prologue.replace(f"#include <{name}>", "")
    prologue = prologue.replace('extern "C" __global__', "__global__")
    first = _BIND + '#include "counting/counted_on_cpu.h"\n' * counted
    units = []
    for number, group in enumerate(_group(kernels)):
        body = "".join(kernel.definition() for kernel in group) + "".join(kernel.export() for kernel in group)
        units.append(header + prologue + body + ("" if number else first))
    return tuple(units)


def _group(kernels: Sequence[_TranslatedKernel]) -> list[list[_TranslatedKernel]]:
    """Split kernels into units of about equal text, so that several g++ processes share the work."""
    groups: list[list[_TranslatedKernel]] = [[]]
    size = 0
    for kernel in kernels:
        if groups[-1] and size + len(kernel.text) > _UNIT_CHARACTERS:
            groups.append([])
            size = 0
        groups[-1].append(kernel)
        size += len(kernel.text)
    return groups


def _translate_kernel(definition: re.Match[str], body: str, helpers_meet: bool) -> _TranslatedKernel:
    name, parameters = definition.groups()
    members: list[str] = []

    def move_to_struct(match: re.Match[str]) -> str:
        alignment, kind, variable, extents = match.groups()
        members.append(f"{alignment.replace('__align__', 'alignas')}{kind} {variable}{extents};")
        return f"auto& {variable} = reinterpret_cast<{name}_shared*>(cuda_on_cpu::static_shared)->{variable};"

    needs_fibers = helpers_meet or bool(_MEETING.search(body))
    body = _DYNAMIC_SHARED.sub(r"auto* \2 = reinterpret_cast<\1*>(cuda_on_cpu::dynamic_shared);", body)
    body = _STATIC_SHARED.sub(move_to_struct, body)
    # Local copies live in registers; the thread-local originals would be read again after each barrier.
    locals_ = "const auto threadIdx = ::threadIdx, blockIdx = ::blockIdx;"
    text = f"__global__ void {name}({parameters}) {{ {locals_}\n{body}"
    return _TranslatedKernel(name, tuple(members), text, needs_fibers)


def compile_kernels(source: str, *, counted: bool = False) -> Path:
    """Compile CUDA `source` for the CPU, or find it in the cache; if `counted`, to tell of every access."""
    # A home folder may be shared by machines, and -march=native means something else on each.
    processor = image_key(" ".join(sorted(cpu_flags())).encode())
    return build_library(
        translate(source, counted=counted),
        name="kernels",
        compile_flags=(
            *(_COUNTED_FLAGS if counted else _COMPILE_FLAGS),
            f"-DHYBRIDC_PROCESSOR=0x{processor}",
        ),
        # The units share the prologue, whose plain functions each of them defines.
        link_flags=("-Wl,-z,muldefs",),
        depends_on=tuple(sorted(NATIVE_FOLDER.rglob("*.h"))),
    )
