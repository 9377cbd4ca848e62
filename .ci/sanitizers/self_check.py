"""Holds the sanitizers against seeded faults: a helper and emulated kernels that leave their memory.

Each fault runs in a process of its own, which has to die of it with a report; exits with a message otherwise.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

GOOD_FREE = "void FreeData(DLTensor* tensor) { std::free(tensor->data); }"
OVERRUN = "static_cast<char*>(tensor->data)[ffi::GetDataSize(*tensor)] = 0;"
BAD_FREE = GOOD_FREE.replace("{ ", f"{{ {OVERRUN} ")

# A volatile pointer hides the array's extent from UBSan, so that the fault is left to ASan.
LOCAL = """
extern "C" __global__ void leave(float* x, int place) {
  float own[4] = {x[0], x[1], x[2], x[3]};
  float* volatile element = own + place;
  __syncthreads();
  *element = 1.0f;
  x[threadIdx.x] = own[threadIdx.x];
}
"""
SHARED = """
extern "C" __global__ void leave(float* x, int place) {
  __shared__ float first[4];
  __shared__ float second[4];
  second[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  first[place] = 1.0f;
  x[threadIdx.x] = second[threadIdx.x];
}
"""


def helper() -> None:
    """An arena in host memory is overrun by the helper of an artifact's library."""
    from hybridc.codegen import helper
    from hybridc.runtime import load
    from tests.support.artifacts import cpu_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in helper.HELPER_SOURCE.parent.iterdir():
            text = file.read_text()
            assert file != helper.HELPER_SOURCE or GOOD_FREE in text
            (folder / file.name).write_text(text.replace(GOOD_FREE, BAD_FREE))
        helper.HELPER_SOURCE = folder / helper.HELPER_SOURCE.name
        load(cpu_model().write(folder / "model.hyb")).close()


def leave_array(source: str) -> None:
    """Run the kernel `leave` of `source`, which writes behind the last of four elements."""
    import ctypes

    import numpy as np

    from hybridc import emulator
    from tests.support.gpu_program import Program, call, upload

    emulator.start(1 << 20)
    arguments = [upload(np.zeros(4, np.float32)), ctypes.c_int(4)]
    Program(source).launch("leave", arguments, block=4)
    call("cudaDeviceSynchronize")


def local_memory() -> None:
    """A kernel, in a thread's local memory."""
    leave_array(LOCAL)


def shared_memory() -> None:
    """A kernel, in shared memory, from one array into the next: no guard page finds that."""
    leave_array(SHARED)


FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    "helper": (helper, "AddressSanitizer: heap-buffer-overflow"),
    "local_memory": (local_memory, "AddressSanitizer: stack-buffer-overflow"),
    "shared_memory": (shared_memory, "runtime error: index 4 out of bounds"),
}


def check(name: str) -> None:
    command = [sys.executable, __file__, name]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode == 0 or FAULTS[name][1] not in done.stderr:
        print(done.stderr[-4000:], file=sys.stderr)
        sys.exit(f"sanitize: sanitizers are not in effect: the seeded fault `{name}` is not reported")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        FAULTS[sys.argv[1]][0]()
    else:
        for name in FAULTS:
            check(name)
        print(f"sanitizers are in effect: {len(FAULTS)} seeded faults are reported")
