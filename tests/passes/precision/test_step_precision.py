"""Training steps in bf16: which products are marked, and which tensors lie in memory as bfloat16."""

from __future__ import annotations

from functools import cache

from tvm import relax

from hybridc.frontend import read_model
from hybridc.models.builder import LINEAR_GAIN, GraphBuilder
from hybridc.options import ANY_ERROR, BF16, CompileOptions
from hybridc.passes.phases import ImportedNetwork, Job
from hybridc.passes.pipeline import run_stages
from hybridc.passes.program.program import Program, is_op, tensor_dtype
from hybridc.passes.training.spec import TrainingSpec, parse_loss, parse_optimizer
from hybridc.passes.training.step import training_programs
from hybridc.progress import NullProgress
from hybridc.schedules.rule import PRECISION, PRECISION_NOTE
from hybridc.targets import parse_target


@cache
def step(*, length: int = 4000, taps: int = 5, target: str = "amx") -> Program:
    """A line of 16 channels behind one of a single channel; Adam's updates are kernels of their own."""
    g = GraphBuilder("line", 4)
    x = g.relu(g.conv(g.input("x", (2, 1, length)), 16, taps, padding=taps // 2))
    x = g.relu(g.conv(x, 16, taps, padding=taps // 2))
    model = g.model(y=g.conv(x, 16, taps, padding=taps // 2, gain=LINEAR_GAIN))
    spec = TrainingSpec(parse_loss("mse"), parse_optimizer("adam:lr=0.01"))
    made = training_programs(read_model(model, parameters=spec.trains), spec, split_layers=False).step
    options = CompileOptions(target=parse_target(target), precision=BF16, rounding_error=ANY_ERROR)
    start = ImportedNetwork(Job(options), Program(made.module, made.weights, made.origins))
    found: Program = run_stages(start, NullProgress(), stop_after="precision").program
    return found


def results(program: Program, kind: str = "") -> list[str]:
    """Types of the results, where there is one, of all calls of functions of a kind, in order."""
    calls = [b for b in program.bindings if is_op(b.value, "call_tir")]
    calls = [b for b in calls if isinstance(b.var.ty, relax.TensorType)]
    return [tensor_dtype(b.var) for b in calls if b.value.args[0].name_hint.startswith(kind)]


def test_activations_and_their_gradients_are_bfloat16() -> None:
    """But for the result that the loss alone reads, and a gradient that no bf16 product multiplies."""
    assert results(step(), "conv1d_add") == ["bfloat16", "bfloat16", "float32"]
    assert results(step(), "full_mse_loss_gradient") == ["bfloat16"]
    assert results(step(), "conv1d_relu_gradient") == ["bfloat16", "float32"]


def test_gradients_of_weights_and_what_the_loss_reads_stay_float32() -> None:
    assert set(results(step(), "conv1d_wgrad")) == {"float32"}
    assert set(results(step(), "mse_loss")) == {"float32"}
    assert set(results(step(), "sum")) == {"float32"}
    assert {tensor_dtype(output) for output in step().outputs} <= {"float32", "int64"}


def test_small_tensors_stay_float32() -> None:
    assert "bfloat16" not in results(step(length=100))


def test_products_without_a_kernel_say_why() -> None:
    marked = [f.attrs for f in step().functions.values() if PRECISION in f.attrs or PRECISION_NOTE in f.attrs]
    notes = {str(attributes[PRECISION_NOTE]) for attributes in marked if PRECISION_NOTE in attributes}
    assert notes == {"fp32 is predicted to be faster"}  # the weight gradient of one channel
    assert sum(attributes.get(PRECISION) == BF16 for attributes in marked) >= 4


def test_what_fourier_transforms_read_and_write_is_bfloat16() -> None:
    """Though they multiply floats: long kernels take fewer products so than vectors of bf16 save."""
    found = step(taps=51, target="avx512_bf16")
    notes = {str(f.attrs[PRECISION_NOTE]) for f in found.functions.values() if PRECISION_NOTE in f.attrs}
    assert "Fourier transforms in fp32 are predicted to be faster" in notes
    assert results(found, "conv1d_add") == ["bfloat16", "bfloat16", "bfloat16"]
    assert set(results(found, "conv1d_relu_gradient")) == {"bfloat16"}
    assert set(results(found, "conv1d_wgrad")) == {"float32"}
