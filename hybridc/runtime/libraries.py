"""TVM's runtime libraries without TVM: what `import tvm` costs (a compiler, 1.3 s) is not needed to run."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

import tvm_ffi

from hybridc.artifact.load import Artifact
from hybridc.errors import DeviceError
from hybridc.runtime.forks import claim_gpu
from hybridc.targets import available_threads, runs_on

CUDA_RUNTIME = "libcudart.so.13"
SPINS = 1000
"""How often an idle worker looks for work, and yields its core, before it sleeps: longer than any gap between
two kernels. TVM's own 300,000 keep a core from a second session, or from any other program, for a tenth of a
second."""
_BIG_CORES = 1  # ThreadGroup::kBig: all cores of the fastest kind
_CUDA, _EXISTS, _COMPUTE_VERSION = 2, 0, 4  # kDLCUDA, DeviceAttrKind of TVM's device_api.h
_configured = threading.local()


def load_runtime(*, cuda: bool) -> None:
    """Load libtvm_runtime, and with `cuda` its CUDA part. Both stay loaded; loading again does nothing.

    Raises DeviceError HC402 where the NVIDIA driver or the CUDA runtime is missing, UsageError HC559 where a
    process that forked this one uses the GPU.
    """
    os.environ.setdefault("TVM_BIND_THREADS", "0")  # TVM would pin the caller's own thread
    os.environ.setdefault("TVM_NUM_THREADS", str(available_threads()))  # its default is half the cores
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", str(SPINS))
    folder = tvm_folder()
    ctypes.CDLL(str(folder / "libtvm_runtime.so"), ctypes.RTLD_GLOBAL)
    if not cuda:
        return
    try:
        _load_cuda_runtime()
        ctypes.CDLL(str(folder / "libtvm_runtime_cuda.so"), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise no_gpu(str(error)) from None
    claim_gpu()


def no_gpu(reason: str) -> DeviceError:
    """The error for an artifact that needs a GPU where there is none."""
    emulated = 'the emulated GPU: --emulate-gpu 1GiB, or in Python load(..., emulate_gpu="1GiB")'
    remedy = f"install the NVIDIA driver, or use {emulated}"
    return DeviceError("HC402", f"no usable GPU: {reason}", remedy=remedy)


def check_gpu(artifact: Artifact) -> None:
    """Raise DeviceError HC413 if the GPU can load neither machine code nor PTX of the artifact.

    CUDA itself says so at the first launch of a kernel. Allocates nothing.
    """
    attribute = _global("runtime.GetDeviceAttr")
    if not attribute(_CUDA, 0, _EXISTS):
        return  # which the first use of the GPU tells
    version = str(attribute(_CUDA, 0, _COMPUTE_VERSION))
    major, minor = map(int, version.split("."))
    names = artifact.manifest.cuda_architectures
    if not runs_on(names, (major, minor)):
        isa = artifact.manifest.target.rpartition("+")[2]
        what = (
            f"the GPU is of compute capability {version}, but the artifact's code is for {', '.join(names)}"
        )
        remedy = f"compile the model for --target cuda:sm_{major}{minor}+{isa}"
        raise DeviceError("HC413", what, where=str(artifact.path), remedy=remedy)


def limit_threads(count: int) -> None:
    """Let parallel kernels that this thread calls one by one use `count` threads: TVM makes a pool for each
    thread. Sessions have workers of their own."""
    if getattr(_configured, "count", None) != count:
        _global("runtime.config_threadpool")(_BIG_CORES, count)
        _configured.count = count


def _global(name: str) -> Any:
    return tvm_ffi.get_global_func(name)


def tvm_folder() -> Path:
    """Where the libraries of apache-tvm are. Raises DeviceError HC406 if it is not installed."""
    spec = importlib.util.find_spec("tvm")  # finds the package and does not import it
    if spec is None or spec.origin is None:
        raise DeviceError("HC406", "apache-tvm is not installed", remedy="pip install apache-tvm")
    return Path(spec.origin).parent / "lib"


def cuda_runtime_file() -> Path | None:
    """The CUDA runtime of NVIDIA's wheel; None: it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((path for folder in folders for path in Path(folder).glob(f"*/lib/{CUDA_RUNTIME}")), None)


def _load_cuda_runtime() -> None:
    """The CUDA runtime of the process or the system, else the one from NVIDIA's wheel."""
    try:
        ctypes.CDLL(CUDA_RUNTIME, ctypes.RTLD_GLOBAL)
    except OSError:
        found = cuda_runtime_file()
        if found is None:
            raise
        ctypes.CDLL(str(found), ctypes.RTLD_GLOBAL)
