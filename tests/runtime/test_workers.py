"""Threads that share a kernel's loop, in a program of their own (`workers.cc`)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tvm_ffi import libinfo

from hybridc.codegen.helper import HELPER_SOURCE


def test_each_task_runs_once_whichever_workers_have_cores(tmp_path: Path) -> None:
    """The caller runs the tasks of workers that have not begun; what fails is told."""
    program, source = tmp_path / "workers", Path(__file__).with_name("workers.cc")
    folders = [str(HELPER_SOURCE.parent), *libinfo.include_paths()]
    library = Path(libinfo.find_libtvm_ffi())
    command = ["g++", "-std=c++20", "-O1", *(f"-I{folder}" for folder in folders), str(source), str(library)]
    subprocess.run([*command, f"-Wl,-rpath,{library.parent}", "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
