"""A compiler, a runtime and an emulator that only pretend, for tests of the command line alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

from hybridc.artifact.load import Artifact
from hybridc.artifact.manifest import FORMAT
from hybridc.cli import main
from hybridc.ir import Arena, Buffer, BufferKind, Copy, Device, Graph, Kernel, Plan, Role, Run, Tensor
from hybridc.machine import load_machine
from hybridc.options import CompileOptions
from hybridc.progress import Progress
from hybridc.results import Cached

MIB = 1024**2
ALL_GPU_PEAK_BYTES = 8 * MIB
SMALLEST_BUDGET_BYTES = MIB + 1
MANIFEST_TEXT = json.dumps({"format": FORMAT})
"""As much of an artifact as the command line itself looks at."""


def variance(mean: float = 300.0) -> onnx.ModelProto:
    """E[x^2] - E[x]^2 of rows of `x + mean`, which float32 can only know to about 1e-7 of mean^2."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [16, 64])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [16])
    nodes = [
        onnx.helper.make_node("Add", ["x", "mean"], ["shifted"]),
        onnx.helper.make_node("Mul", ["shifted", "shifted"], ["square"]),
        onnx.helper.make_node("ReduceMean", ["square"], ["of_square"], axes=[1], keepdims=0),
        onnx.helper.make_node("ReduceMean", ["shifted"], ["of_x"], axes=[1], keepdims=0),
        onnx.helper.make_node("Mul", ["of_x", "of_x"], ["squared"]),
        onnx.helper.make_node("Sub", ["of_square", "squared"], ["y"]),
    ]
    weights = [onnx.numpy_helper.from_array(np.array([mean], np.float32), "mean")]
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], weights)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)


def small_graph() -> Graph:
    return Graph(
        kernels=(
            Kernel("k0", "f", ("x",), ("a",), origins=("Relu_0",)),
            Kernel("k1", "f", ("a",), ("y",), (("y", "a"),), origins=("Relu_1",)),
        ),
        tensors=(
            Tensor("x", (2, 3), "float32", Role.INPUT),
            Tensor("a", (2, 3), "float32", Role.ACTIVATION),
            Tensor("y", (2, 3), "float32", Role.OUTPUT),
        ),
        inputs=("x",),
        outputs=("y",),
    )


def small_plan(budget_bytes: int | None) -> Plan:
    return Plan(
        steps=(
            Run("k0", Device.CPU),
            Copy("a", Device.CPU, Device.GPU, (0,)),
            Run("k1", Device.GPU, (1,)),
            Copy("y", Device.GPU, Device.CPU, (2,)),
        ),
        buffers=(
            Buffer("x", BufferKind.TENSOR, Device.CPU, 0, 24, -1, 0),
            Buffer("a", BufferKind.TENSOR, Device.CPU, 512, 24, 0, 1),
            Buffer("a", BufferKind.TENSOR, Device.GPU, 0, 24, 1, 2),
            Buffer("y", BufferKind.TENSOR, Device.GPU, 0, 24, 2, 3),
            Buffer("y", BufferKind.TENSOR, Device.CPU, 0, 24, 3, 4),
        ),
        arenas=(Arena(Device.GPU, 512, 512), Arena(Device.CPU, 768, 768)),
        budget_bytes=budget_bytes,
        step_us=(1.0, 2.0, 3.0, 4.0),
        makespan_us=10.0,
        time_bound_us=8.0,
    )


@dataclass(frozen=True)
class Port:
    name: str
    shape: tuple[int, ...]
    type: str


@dataclass(frozen=True)
class DeviceMemory:
    planned_bytes: int
    allocated_bytes: int


class FakeSession:
    """y = max(x, 0), under names that no file system likes."""

    def get_inputs(self) -> list[Port]:
        return [Port("in=x", (2, 3), "tensor(float)")]

    def get_outputs(self) -> list[Port]:
        return [Port("../y/0", (2, 3), "tensor(float)")]

    def run(self, output_names: Sequence[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [np.maximum(feeds["in=x"], 0)]

    @property
    def artifact(self) -> Any:
        return _Record(graph=small_graph(), plan=small_plan(MIB))

    def artifact_for(self, feeds: dict[str, np.ndarray]) -> Any:
        return self.artifact

    def measure(self, feeds: dict[str, np.ndarray]) -> tuple[tuple[float, float], ...]:
        return ((0.0, 2.0), (2.0, 5.0), (5.0, 9.0), (9.0, 20.0))

    def memory(self) -> dict[Device, DeviceMemory]:
        return {Device.GPU: DeviceMemory(512, 512)}


@dataclass
class Fakes:
    """What the command line asked of the fakes, and an error for them to raise."""

    options: list[CompileOptions] = field(default_factory=list)
    bound_seconds: list[float | None] = field(default_factory=list)
    emulated_bytes: list[int] = field(default_factory=list)
    choices: list[dict[str, int | None]] = field(default_factory=list)
    """What sessions were loaded with."""
    artifact_budgets: tuple[int | None, ...] = (MIB,)
    error: BaseException | None = None

    def compile_model(
        self, source: Path, output: Path, options: CompileOptions, progress: Progress | None = None
    ) -> Any:
        self.options.append(options)
        if self.error is not None:
            raise self.error
        if options.stop_after is not None:
            return _Record(path=None, graphs=(), plans=(), seconds={"import": 0.5})
        output.mkdir(parents=True, exist_ok=True)
        (output / "manifest.json").write_text(MANIFEST_TEXT)
        return _Record(
            path=output,
            graphs=(small_graph(),) * len(_plans(options)),
            plans=_plans(options),
            seconds={"import": 0.5, "link": 1.0},
            tuned={"f": "8x3"} if options.tune_seconds else {},
            measured_us=_measured_us(options),
            cached=Cached(53, 56) if options.cache else None,
            cuda_image_bytes=262 << 10 if options.target.has_gpu else None,
            buckets=(),
        )

    def plan_model(
        self,
        source: Path,
        options: CompileOptions,
        progress: Progress | None = None,
        *,
        bound_seconds: float | None = None,
        listening: object = None,
    ) -> Any:
        self.options.append(options)
        self.bound_seconds.append(bound_seconds)
        if self.error is not None:
            raise self.error
        return _Record(
            graphs=(small_graph(),) * len(_plans(options)),
            plan=_plans(options)[-1],
            plans=_plans(options),
            all_gpu_peak_bytes=ALL_GPU_PEAK_BYTES,
            smallest_budget_bytes=SMALLEST_BUDGET_BYTES,
            smallest_bytes_bound=MIB,
            whole=None,
            machine=replace(options.machine, measured_us=_measured_us(options)),
            pins=({},) * len(_plans(options)),
            planning=None,
            buckets=(),
        )

    def open_artifact(self, path: Path, **checks: bool) -> Any:
        plans = tuple(small_plan(budget_bytes) for budget_bytes in self.artifact_budgets)
        stored = (_Record(pins={}),) * len(plans)
        manifest: Any = _Record(
            machine=load_machine(),
            plans=stored,
            interfaces=((),),
            dimensions=(),
            cuda_architectures=("sm_75", "sm_90"),
            cuda_image_bytes=262 << 10,
        )
        return Artifact(path, manifest, (small_graph(),) * len(plans), plans, len(plans) - 1)

    def load(self, path: Path, **choices: int | None) -> FakeSession:
        self.choices.append(choices)
        if self.error is not None:
            raise self.error
        return FakeSession()

    def start(self, memory_bytes: int) -> None:
        self.emulated_bytes.append(memory_bytes)

    def is_active(self) -> bool:
        return bool(self.emulated_bytes)

    def count_launches(self, run: Callable[[], object]) -> tuple[Any, ...]:
        run()
        return (LAUNCH,)

    def launches_of_steps(self, graph: Graph, plan: Plan, launches: Sequence[Any]) -> dict[int, Any]:
        return {0: launches}

    def statistics(self) -> Any:
        return _Record(capacity_bytes=self.emulated_bytes[-1], peak_bytes=768)


def _measured_us(options: CompileOptions) -> dict[tuple[str, Device], float]:
    return {("f", Device.CPU): 2.5} if options.profile_kernels else {}


def _plans(options: CompileOptions) -> tuple[Plan, ...]:
    if not options.gpu_memory:
        return (small_plan(None),)
    budgets = {budget.resolve(ALL_GPU_PEAK_BYTES) for budget in options.gpu_memory}
    return tuple(map(small_plan, sorted(budgets)))


class _Record:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


LAUNCH = _Record(
    blocks=32,
    counted_blocks=16,
    read_sectors=8192.0,
    least_read_sectors=1024.0,
    written_sectors=1024.0,
    least_written_sectors=1024.0,
    wavefronts=0.0,
    least_wavefronts=0.0,
)
"""What the pretended emulated GPU counts of the plan's first step."""


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Fakes in place of the compiler, the runtime, the artifact reader and the emulator."""
    import hybridc
    import hybridc.runtime.session  # real, and not found any more once its folder is pretended
    import hybridc.training.artifact  # real, too: it asks the real folder of the artifact reader

    pretending = Fakes()
    for name, functions in {
        "compiler": ("compile_model", "plan_model"),
        "runtime": ("load",),
        "artifact": ("open_artifact",),
        "emulator": ("start", "is_active", "statistics", "count_launches", "launches_of_steps"),
    }.items():
        module = ModuleType(f"hybridc.{name}")
        for function in functions:
            setattr(module, function, getattr(pretending, function))
        monkeypatch.setitem(sys.modules, f"hybridc.{name}", module)
        monkeypatch.setattr(hybridc, name, module, raising=False)
    return pretending


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that only looks like a model."""
    path = tmp_path / "network.onnx"
    path.write_bytes(b"not read by the fakes")
    return path


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "network.hyb"
    path.mkdir()
    (path / "manifest.json").write_text(MANIFEST_TEXT)
    return path


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Runs command lines in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: object) -> Outcome:
        code = main([str(word) for word in argv])
        captured = self._capsys.readouterr()
        return Outcome(code, captured.out, captured.err)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)
