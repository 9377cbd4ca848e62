"""README.md of a bundle: what it is, and how it is used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hybridc.artifact import Artifact, Port

_TEXT = """\
# {name}

A model that hybridc {version} compiled for `{target}`, with all that a run needs. This computer needs
Linux on x86-64, {needs}. It needs neither Python nor a compiler.

    ./run --random                            # draws inputs, prints types, shapes and times
    ./run {inputs} --output outputs
    ./run --help

Inputs and outputs are files of numpy's format .npy; `--inputs FILE.npz` and `--output FILE.npz` have all in
one file.

| | name | type | shape |
|---|---|---|---|
{ports}

## In a program

`include/hybridc.h` is a C11 header, `lib/libhybridc_runtime.so` the library; one library serves any number
of bundles. `example/` has programs in C and C++ that use it:

    cmake -S example -B build && cmake --build build && build/main . && build/main_cpp .

## Files

`sha256sum -c SHA256SUMS` tells whether all files are as they were written; `program.json`, `library.so` and
`weights.bin` are checked whenever the bundle is opened. Hashes do not tell who wrote the files: `library.so`
is native code. `licenses/` has the licenses of Apache TVM{nvidia}; libstdc++ and libgcc_s are GCC's, under
the GPL with the GCC Runtime Library Exception. Where there is no /proc, set LD_LIBRARY_PATH to `lib`.
"""


def readme(artifact: Artifact, files: Iterable[Path]) -> str:
    """The text for an artifact whose bundle has these files."""
    manifest = artifact.manifest
    inputs = " ".join(f"--input '{port.name}=FILE.npy'" for port in manifest.inputs)
    glibc = ".".join(
        map(str, max(glibc_version(path.read_bytes()) for path in files if path.suffix != ".bin"))
    )
    needs = [
        f"glibc {glibc} or newer",
        f"a processor with {', '.join(manifest.instruction_sets[0].cpu_flags)}",
    ]
    if artifact.has_gpu_code:
        needs.append("an NVIDIA GPU and its driver")
    return _TEXT.format(
        name=manifest.source.name,
        version=manifest.versions.hybridc,
        target=manifest.target,
        needs=" and ".join(", ".join(needs).rsplit(", ", 1)),
        inputs=inputs,
        ports="\n".join([*_rows("input", manifest.inputs), *_rows("output", manifest.outputs)]),
        nvidia=" and of NVIDIA's CUDA runtime" * artifact.has_gpu_code,
    )


def _rows(kind: str, ports: Sequence[Port]) -> list[str]:
    def extents(port: Port) -> str:
        cut = {cut.axis for cut in port.cuts}
        words = ("at most " * (axis in cut) + str(extent) for axis, extent in enumerate(port.shape))
        return " x ".join(words) or "a single number"

    return [f"| {kind} | {port.name} | {port.dtype} | {extents(port)} |" for port in ports]


def glibc_version(content: bytes) -> tuple[int, ...]:
    """The newest version of glibc whose symbols an ELF file asks for; (0,) of any other file."""
    found = re.findall(rb"GLIBC_(\d+(?:\.\d+)+)\0", content) if content.startswith(b"\x7fELF") else []
    return max((tuple(int(part) for part in version.split(b".")) for version in found), default=(0,))
