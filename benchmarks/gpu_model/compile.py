"""CUDA C++ that somebody else wrote becomes a cubin."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hybridc.codegen.cuda import compile_cubin
from hybridc.errors import UsageError
from hybridc.scratch import scratch_folder


def cubin_of(source: str, architecture: str, include: Sequence[Path] = ()) -> bytes:
    """Compile with nvcc where there is one, since files often have code for the host too, else with NVRTC.

    A header of cuBLAS that is missing is taken to be empty: kernels do not need it. Raises UsageError HC530
    if the compiler refuses the source.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return compile_cubin(source, architecture, include)
    with scratch_folder("gpu-model-") as folder:
        (folder / "kernels.cu").write_text(source)
        stubs = folder / "stubs"
        stubs.mkdir()
        (stubs / "cublas_v2.h").touch()
        folders = [f"-I{path}" for path in include] + ["-Xcompiler", f"-idirafter,{stubs}"]
        command = [nvcc, f"-arch={architecture}", "-cubin", *folders, "kernels.cu", "-o", "kernels.cubin"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            what = "nvcc rejects the source"
            raise UsageError("HC530", f"{what}:\n{done.stderr.strip()[-2000:]}")
        return (folder / "kernels.cubin").read_bytes()
