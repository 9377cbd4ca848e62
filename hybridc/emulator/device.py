"""The emulated GPU as a process sees it: starting it, its statistics, its failures.

The fake `libcudart.so.13` and `libcuda.so.1` are loaded with global visibility before TVM's unmodified
`libtvm_runtime_cuda.so`, whose needs the dynamic linker then finds satisfied.
"""

from __future__ import annotations

import ctypes
import enum
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hybridc.emulator.counting import LaunchCounts, LaunchCountsFields
from hybridc.emulator.kernels import compile_kernels
from hybridc.emulator.toolchain import NATIVE_FOLDER, build_library, cuda_include_folder
from hybridc.errors import DeviceError
from hybridc.runtime.forks import claim_gpu

_DRIVER_NAME = "libcuda.so.1"
_RUNTIME_NAME = "libcudart.so.13"
_MAXIMUM_WORKERS = 16  # each keeps up to 1,024 stacks mapped, and a process may hold 65,530 mappings


class ThreadOrder(enum.IntEnum):
    """In which order the threads of a block run between two barriers.

    CUDA promises no order, so a kernel whose result depends on it lacks a barrier.
    """

    FORWARD = 0
    REVERSE = 1
    SHUFFLED = 2
    WARPS = 3
    """A warp runs until it waits for other warps. In the other orders all threads stop wherever those of one
    warp meet, which hides that a barrier is missing in front of a warp operation."""


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """What the device holds now and has done since the process started.

    Copies from host to device are h2d, from device to host d2h; `allocations` counts calls, `launches`
    kernels that were begun, those of CUDA graphs among them, and `graph_launches` the graphs. `pinned_bytes`
    of the host, `streams`, `events` and `graphs`, captured and instantiated, are those that nobody has freed
    yet.
    """

    used_bytes: int
    peak_bytes: int
    capacity_bytes: int
    allocations: int
    launches: int
    h2d_copies: int
    h2d_bytes: int
    d2h_copies: int
    d2h_bytes: int
    graph_launches: int
    pinned_bytes: int
    streams: int
    events: int
    graphs: int


class Fault(enum.IntEnum):
    """What a call fails with, by CUDA's number of the error."""

    OUT_OF_MEMORY = 2
    LAUNCH_FAILURE = 719
    """Poisons the device: every later call fails, too, until `reset`."""
    UNKNOWN = 999


class _Configuration(ctypes.Structure):
    """Mirrors Configuration in native/device.h."""

    _fields_ = (
        ("capacity_bytes", ctypes.c_uint64),
        ("present", ctypes.c_int32),
        ("compute_major", ctypes.c_int32),
        ("compute_minor", ctypes.c_int32),
        ("thread_order", ctypes.c_int32),
        ("lazy_streams", ctypes.c_int32),
        ("worker_count", ctypes.c_int32),
        ("guard_tensors", ctypes.c_int32),
        ("refuse_graphs", ctypes.c_int32),
    )


class _TensorRange(ctypes.Structure):
    """Mirrors TensorRange in native/memory.h."""

    _fields_ = (
        ("offset_bytes", ctypes.c_uint64),
        ("size_bytes", ctypes.c_uint64),
        ("is_workspace", ctypes.c_bool),
    )


class _Statistics(ctypes.Structure):
    """Mirrors Statistics in native/device.h."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in DeviceStatistics.__slots__)


@dataclass(slots=True)
class _Process:
    """What this process has loaded."""

    library: ctypes.CDLL | None = None
    configuration: _Configuration | None = None
    """Of the started device; None while there is only the driver."""


_process = _Process()
_images: dict[str, Path] = {}
_sources: dict[str, str] = {}
"""Of images, by their keys."""


def configure(
    memory_bytes: int,
    *,
    thread_order: ThreadOrder = ThreadOrder.FORWARD,
    lazy_streams: bool = False,
    guard_tensors: bool = False,
    refuse_graphs: bool = False,
    compute_capability: tuple[int, int] = (9, 0),
) -> None:
    """What `start` does for the device: see there."""
    if memory_bytes <= 0:
        raise ValueError(f"memory_bytes must be positive, not {memory_bytes}")
    claim_gpu()
    library = _load()
    wanted = _Configuration(
        memory_bytes,
        1,
        *compute_capability,
        int(thread_order),
        int(lazy_streams),
        min(os.cpu_count() or 1, _MAXIMUM_WORKERS),
        int(guard_tensors),
        int(refuse_graphs),
    )
    used_bytes = library.hybridc_emulator_configure(ctypes.byref(wanted))
    if used_bytes:
        raise DeviceError(
            "HC424",
            f"the emulated GPU cannot shrink to {memory_bytes} bytes: {used_bytes} bytes are in use",
            remedy="close the sessions that hold it first",
        )
    _process.configuration = wanted


def guards_tensors() -> bool:
    """Whether `guard_arena` is to be called for arenas."""
    return _process.configuration is not None and bool(_process.configuration.guard_tensors)


def guard_arena(address: int, steps: Iterable[tuple[str, Iterable[tuple[int, int, bool]]]]) -> None:
    """Tell of the allocation at `address` what each step that launches kernels may touch, until it is freed.

    A step is the name of its function's first CUDA kernel, with offset and size in bytes of each tensor, and
    whether it is workspace, in which kernels lay out tensors of their own.
    """
    library = _started_library()
    for kernel, tensors in steps:
        ranges = [_TensorRange(*tensor) for tensor in tensors]
        table = (_TensorRange * len(ranges))(*ranges)
        arena = ctypes.c_void_p(address)
        if library.hybridc_emulator_add_tensors(arena, kernel.encode(), table, ctypes.c_uint64(len(ranges))):
            raise ValueError(f"there is no allocation at {address:#x}")


def preload() -> None:
    """Make TVM able to compile for CUDA.

    Without a GPU driver on the machine this loads the emulated one, without a device. With one it loads
    NVIDIA's libraries, of which TVM by itself does not find the wheel's. Raises DeviceError HC421 to HC423.
    """
    if _process.library is not None or not _has_real_driver():
        _load()
        return
    try:
        ctypes.CDLL(_RUNTIME_NAME, ctypes.RTLD_GLOBAL)
    except OSError:
        ctypes.CDLL(str(cuda_include_folder().parent / "lib" / _RUNTIME_NAME), ctypes.RTLD_GLOBAL)
    _load_tvm_cuda_runtime()


def has_real_driver() -> bool:
    """Whether this process uses, or could use, NVIDIA's own driver; loads it if so."""
    return _process.library is None and _has_real_driver()


def is_active() -> bool:
    """Whether this process has an emulated GPU."""
    return _process.configuration is not None


def statistics() -> DeviceStatistics:
    """Bytes, launches and copies of the emulated GPU."""
    result = _Statistics()
    _started_library().hybridc_emulator_statistics(ctypes.byref(result))
    return DeviceStatistics(**{name: getattr(result, name) for name in DeviceStatistics.__slots__})


def reset_peak() -> None:
    """Let `peak_bytes` start again from what is in use now."""
    _started_library().hybridc_emulator_reset_peak()


def count_calls() -> dict[str, int]:
    """How often each function of CUDA that can fail was called since `fail_call`, by its name.

    A function that does nothing but call another one is not counted: cudaMemcpy is cudaMemcpyAsync.
    """
    text: bytes = _started_library().hybridc_emulator_calls()
    lines = (line.split() for line in text.decode().splitlines())
    return {name: int(count) for name, count in lines}


def fail_call(function: str = "", ordinal: int = 0, fault: Fault = Fault.UNKNOWN) -> None:
    """Count calls from 0 again, and let that number `ordinal` of a function fail; without a name none fails.

    The call does nothing and returns the error, so that a test sees what its caller does then.
    """
    watch = _started_library().hybridc_emulator_watch_calls
    watch(function.encode(), ctypes.c_uint64(ordinal), int(fault))


def last_failure() -> str:
    """What poisoned the device, for example `kernel k: out-of-bounds access at ...`; "" if nothing did."""
    text: bytes = _started_library().hybridc_emulator_failure()
    return text.decode()


def reset() -> None:
    """Finish or drop queued work and make a poisoned device usable again."""
    _started_library().hybridc_emulator_reset()


def register_image(image_key: str, library: Path) -> None:
    """Let the emulated driver run `library` when it is given the image of that key."""
    _images[image_key] = library
    if _process.library is not None:
        _process.library.hybridc_emulator_register_image(int(image_key, 16), os.fsencode(library))


def provide_kernels(image_key: str, source: str) -> Path:
    """Compile CUDA `source` for the CPU and let the emulated driver run it as the image of that key.

    Returns the path of the compiled library, which is cached by its contents. Raises DeviceError
    HC421 to HC423 where g++ or the CUDA headers are missing or the source uses what the emulator lacks.
    """
    library = compile_kernels(source)
    _sources[image_key] = source
    register_image(image_key, library)
    return library


def count_launches(run: Callable[[], object]) -> tuple[LaunchCounts, ...]:
    """What the launches of `run` do to memory, in the order in which they were executed.

    Kernels are compiled once more for this, and up to 16 blocks of each launch run what was. Raises
    DeviceError as `provide_kernels` does, HC425 without an emulated GPU, and whatever `run` raises.
    """
    library = _started_library()
    twins = {key: compile_kernels(source, counted=True) for key, source in _sources.items()}
    try:
        for key, path in twins.items():
            library.hybridc_emulator_count_image(ctypes.c_uint64(int(key, 16)), os.fsencode(path))
        run()
        count = library.hybridc_emulator_counted_launches(None, ctypes.c_uint64(0))
        found = (LaunchCountsFields * count)()
        library.hybridc_emulator_counted_launches(found, ctypes.c_uint64(count))
        return tuple(each.scaled() for each in found)
    finally:
        library.hybridc_emulator_stop_counting()


def _started_library() -> ctypes.CDLL:
    if _process.library is None or _process.configuration is None:
        raise DeviceError(
            "HC425", "this process has no emulated GPU", remedy="call hybridc.emulator.start first"
        )
    return _process.library


def _load() -> ctypes.CDLL:
    """Build and load the fake libraries, then TVM's CUDA runtime on top of them."""
    if _process.library is None:
        _refuse_real_driver()
        runtime_path, driver_path = build_device()
        library = ctypes.CDLL(str(runtime_path), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(driver_path), ctypes.RTLD_GLOBAL)
        library.hybridc_emulator_configure.restype = ctypes.c_uint64
        library.hybridc_emulator_failure.restype = ctypes.c_char_p
        library.hybridc_emulator_calls.restype = ctypes.c_char_p
        library.hybridc_emulator_counted_launches.restype = ctypes.c_uint64
        library.hybridc_emulator_register_image.argtypes = (ctypes.c_uint64, ctypes.c_char_p)
        library.hybridc_emulator_register_image.restype = None
        _process.library = library
        for key, path in _images.items():
            register_image(key, path)
    _load_tvm_cuda_runtime()
    return _process.library


def build_device() -> tuple[Path, Path]:
    """The fake `libcudart.so.13` and `libcuda.so.1`, built or found in the cache.

    Raises DeviceError HC421 to HC423.
    """
    sources = [path.read_text() for path in sorted(NATIVE_FOLDER.rglob("*.cpp"))]
    runtime = build_library(
        sources,
        name="device",
        # Leaving a crashed kernel by a jump is what _FORTIFY_SOURCE's longjmp takes for an error.
        compile_flags=("-O2", "-U_FORTIFY_SOURCE"),
        link_flags=(
            f"-Wl,-soname,{_RUNTIME_NAME}",
            f"-Wl,--version-script={NATIVE_FOLDER / 'exports.map'}",
            "-ldl",
            "-lpthread",
        ),
        depends_on=(*sorted(NATIVE_FOLDER.rglob("*.h")), NATIVE_FOLDER / "exports.map"),
    )
    driver = build_library(
        ("",),
        name="driver",
        link_flags=(f"-Wl,-soname,{_DRIVER_NAME}", "-Wl,--no-as-needed"),
        link_files=(runtime,),
    )
    return runtime, driver


def _load_tvm_cuda_runtime() -> None:
    """Load libtvm_runtime_cuda.so if `import tvm` is over; else that import will load it."""
    if "tvm.base" not in sys.modules or not hasattr(sys.modules["tvm"], "cuda"):
        return
    import tvm_ffi

    if tvm_ffi.get_global_func("device_api.cuda", allow_missing=True) is not None:
        return
    from tvm import base, libinfo

    name = "libtvm_runtime_cuda.so"
    candidates = [folder / name for folder in libinfo.package_lib_paths()]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise DeviceError(
            "HC426", "this TVM has no CUDA runtime", remedy="pip install apache-tvm==0.27.0.post1"
        )
    base._LOADED_LIBS["tvm_runtime_cuda"] = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def _mapped_files() -> str:
    try:
        return Path("/proc/self/maps").read_text()
    except OSError:
        return ""


def _is_real_driver_mapped() -> bool:
    return f"/{_DRIVER_NAME}" in _mapped_files() or "/libcuda.so." in _mapped_files()


def _has_real_driver() -> bool:
    """Whether the real driver's library can be loaded; loads it if so."""
    try:
        ctypes.CDLL(_DRIVER_NAME)
    except OSError:
        return False
    return True


def _refuse_real_driver() -> None:
    if _is_real_driver_mapped():
        raise DeviceError(
            "HC420",
            "the emulated GPU cannot start because this process has loaded a real NVIDIA driver",
            remedy="use the real GPU, or start the emulated one in a process of its own before importing tvm",
        )
