"""The wheel hybridc-runtime: bundles in Python without the compiler.

    python -m hybridc.bundle.wheel FOLDER

writes it: the package in `python/`, the libraries that a bundle has, and what packaging wants to know.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import sys
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from hybridc.bundle.build import RUNTIME, build_runtime
from hybridc.bundle.readme import glibc_version
from hybridc.bundle.write import libraries, licenses
from hybridc.errors import HybridcError, UsageError
from hybridc.scratch import scratch_folder
from hybridc.version import __version__

PACKAGE = "hybridc_runtime"
_SOURCES = Path(__file__).parent / "python"
_EARLIEST = (1980, 1, 1, 0, 0, 0)
"""What a zip file can say: the same packages give the same bytes."""
_METADATA = f"""\
Metadata-Version: 2.4
Name: hybridc-runtime
Version: {__version__}
Summary: Run models that hybridc has compiled and bundled, without a compiler
Requires-Python: >=3.11
Requires-Dist: numpy>=2.0
"""
_WHEEL = """\
Wheel-Version: 1.0
Generator: hybridc
Root-Is-Purelib: false
Tag: {tag}
"""


def write_wheel(folder: str | Path) -> Path:
    """Write the wheel to a folder, and return its path.

    It suits every Python from 3.11 on, on Linux with glibc and libstdc++ as new as its libraries need. Raises
    DeviceError HC403 without g++, HC433 where the CUDA runtime is not installed, UsageError HC562 if it
    cannot be written.
    """
    contents = _package() | _libraries()
    tag = f"py3-none-manylinux_{'_'.join(map(str, _needed_glibc(contents)))}_x86_64"
    info = f"{PACKAGE}-{__version__}.dist-info"
    contents |= {f"{info}/licenses/{name}": text.encode() for name, text in licenses(True).items()}
    contents |= {f"{info}/METADATA": _METADATA.encode(), f"{info}/WHEEL": _WHEEL.format(tag=tag).encode()}
    contents[f"{info}/RECORD"] = _record(contents, f"{info}/RECORD")
    path = Path(folder) / f"{PACKAGE}-{__version__}-{tag}.whl"
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(f".{PACKAGE}-", path.absolute().parent) as scratch:
            _pack(scratch / path.name, contents)
            (scratch / path.name).replace(path)
    except OSError as error:
        what = f"the wheel cannot be written: {error.strerror or error}"
        raise UsageError("HC562", what, where=str(path), remedy="choose another location") from None
    return path


def _package() -> dict[str, bytes]:
    files = [path for path in sorted(_SOURCES.iterdir()) if path.suffix == ".py" or path.name == "py.typed"]
    return {f"{PACKAGE}/{path.name}": path.read_bytes() for path in files}


def _libraries() -> dict[str, bytes]:
    """Those of a bundle but for the compiler's, which the system has wherever it has numpy."""
    runtime = build_runtime(version("apache-tvm-ffi")).library
    found = {name: path.read_bytes() for name, path in libraries(True).items()}
    return {f"{PACKAGE}/lib/{name}": content for name, content in {RUNTIME: runtime, **found}.items()}


def _needed_glibc(contents: Mapping[str, bytes]) -> tuple[int, ...]:
    return max(map(glibc_version, contents.values()))[:2]


def _record(contents: Mapping[str, bytes], own_name: str) -> bytes:
    """Hash and size of each file but of the record itself, as the format of wheels has it."""
    lines = []
    for name, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}\n")
    return "".join([*lines, f"{own_name},,\n"]).encode()


def _pack(path: Path, contents: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in contents.items():
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.external_attr = 0o644 << 16
            entry.create_system = 3  # Unix, whatever writes it
            file.writestr(entry, content, zipfile.ZIP_DEFLATED)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hybridc.bundle.wheel", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the wheel is written")
    try:
        print(write_wheel(parser.parse_args().folder))
    except HybridcError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
