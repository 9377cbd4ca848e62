"""How much rounding to 16 bits, or to tf32, changes results, layer by layer.

The fused network runs once in fp32, one function after the other, on inputs drawn from a seed. What a
function would give with factors in bf16 is what its fp32 kernel gives for rounded factors: bf16 kernels
multiply these exactly and add up in fp32 as well. So this needs no processor that has bf16 instructions, and
no GPU for tf32.
Kernels that read and write float16 compute in float32.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 only after this import
import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from hybridc.ir import Device
from hybridc.options import BF16, FP16, TF32, CompileOptions
from hybridc.passes.program.program import Program, count_uses, is_op, tensor_dtype, tensor_shape, variables
from hybridc.passes.schedule import constant_arguments
from hybridc.progress import Progress
from hybridc.schedules.cpu.math.intrinsics import install as install_vector_functions
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.select import schedule
from hybridc.targets import Target, available_threads, native_isa
from hybridc.tuning.measure import compiled, use_threads

SEED = 0


def rounding_errors_of(
    options: CompileOptions, progress: Progress, sizes: Mapping[str, int] = {}
) -> RoundingErrors | None:
    """What measures the errors that the options ask to keep within a tolerance; None if none arise.

    `sizes` are inputs that are not drawn, the sizes of open dimensions.
    """
    dtype = {BF16: "bfloat16", FP16: "float16", TF32: TF32}.get(options.precision)
    return None if dtype is None else RoundingErrors(progress, dtype, sizes=sizes)


@dataclass
class RoundingErrors:
    """Measures functions of programs; those that it knows already it does not measure again."""

    progress: Progress
    dtype: str
    """That is rounded to."""
    known: dict[str, float] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Inputs that are not drawn."""

    def __call__(self, program: Program, positions: Mapping[str, Collection[int]]) -> Mapping[str, float]:
        """The largest error of each function over its calls; infinite where a result is not finite.

        `positions` are those of the parameters that are rounded, results behind arguments.

        Raises DeviceError HC401 where this processor has not even AVX2.
        """
        new = {name: found for name, found in positions.items() if name not in self.known}
        if new:
            self.progress.stage("precision")
            use_threads(available_threads())
            self.known |= _Run(program, self.progress, self.dtype, self.sizes).errors(new)
        return {name: self.known[name] for name in positions}


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest numbers of a type, as float32; infinite beyond its range."""
    if dtype == TF32:
        return _to_tf32(array)
    with np.errstate(over="ignore"):
        return array.astype(dtype).astype(np.float32)


def _to_tf32(array: np.ndarray) -> np.ndarray:
    """With 10 of 23 bits of the fraction, ties away from zero as `cvt.rna` has it."""
    # the sum of a NaN's bits may be those of a number
    bits = (np.float32(array).view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(array), bits.view(np.float32), array)


def relative_error(result: np.ndarray, reference: np.ndarray) -> float:
    """Norm of the difference over that of the reference; infinite where either is not finite."""
    if not np.isfinite(result).all() or not np.isfinite(reference).all():
        return np.inf
    change = float(np.linalg.norm(np.subtract(result, reference, dtype=np.float64)))
    scale = float(np.linalg.norm(reference.astype(np.float64)))
    return change / scale if scale else (0.0 if change == 0.0 else np.inf)


class _Run:
    """One run of a fused program on the CPU in fp32."""

    def __init__(self, program: Program, progress: Progress, dtype: str, sizes: Mapping[str, int]) -> None:
        self._program, self._progress, self._dtype = program, progress, dtype
        self._scheduled = _scheduled(program)
        install_vector_functions()  # once, before threads compile
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            isa = native_isa()
            made = pool.map(lambda one: compiled(one, isa), self._scheduled.values())
            self._kernels: dict[str, Callable[..., None]] = dict(zip(self._scheduled, made, strict=True))
        generator = np.random.default_rng(SEED)
        self._values: dict[relax.Var, Any] = {
            var: _draw(generator, tensor_shape(var), tensor_dtype(var))
            for var in program.main.params
            if var.name not in program.weights
        }
        for var in self._values:
            if var.name in sizes:
                self._values[var] = np.full(tensor_shape(var), sizes[var.name], tensor_dtype(var))

    def errors(self, positions: Mapping[str, Collection[int]]) -> dict[str, float]:
        found = dict.fromkeys(positions, 0.0)
        uses = count_uses(self._program)
        for number, binding in enumerate(self._program.bindings):
            self._progress.kernels(number, len(self._program.bindings))
            value = binding.value
            if is_op(value, "call_tir"):
                name, arguments = value.args[0].name_hint, [self._value(a) for a in value.args[1].fields]
                results = self._call(name, arguments)
                if name in positions:
                    found[name] = max(found[name], self._error(name, arguments, positions[name], results))
                self._values[binding.var] = results[0] if len(results) == 1 else results
            elif isinstance(value, relax.TupleGetItem):
                self._values[binding.var] = self._values[value.tuple_value][value.index]
            else:
                self._values[binding.var] = self._value(value.args[0]).reshape(tensor_shape(binding.var))
            for var in variables(value):
                uses[var] -= 1
                if not uses[var]:
                    self._values.pop(var, None)
        self._progress.kernels(1, 1)
        return found

    def _error(
        self, name: str, arguments: list[np.ndarray], positions: Collection[int], results: list[np.ndarray]
    ) -> float:
        def changed(arrays: list[np.ndarray], start: int = 0) -> list[np.ndarray]:
            return [
                rounded(array, self._dtype).astype(array.dtype) if i in positions else array
                for i, array in enumerate(arrays, start)
            ]

        found = changed(self._call(name, changed(arguments)), len(arguments))
        return max(map(relative_error, found, results))

    def _value(self, expr: relax.Expr) -> np.ndarray:
        if isinstance(expr, GenericConst):
            return expr.value.numpy()
        return self._program.weights[expr.name] if expr.name in self._program.weights else self._values[expr]

    def _call(self, name: str, arguments: list[np.ndarray]) -> list[np.ndarray]:
        scheduled, packed = self._scheduled[name], list(arguments)
        for position, packing in scheduled.packings:
            packed[position] = packing.apply(packed[position])
        rest = [
            np.empty([int(e) for e in p.shape], str(p.dtype))
            for p in scheduled.function.params[len(packed) :]
        ]
        tensors = [tvm.runtime.tensor(np.asarray(array, order="C")) for array in (*packed, *rest)]
        self._kernels[name](*tensors)
        count = len(rest) - len(scheduled.workspace_bytes) - scheduled.has_checks
        return [tensor.numpy() for tensor in tensors[len(packed) : len(packed) + count]]


def _scheduled(program: Program) -> dict[str, Scheduled]:
    """Functions for this processor, without fast algorithms, whose errors are of another kind."""
    found, target, threads = {}, Target((), native_isa()), available_threads()
    for name, constants in constant_arguments(program).items():
        request = Request(program.module[name], constants, target, winograd=False, threads=threads)
        made = schedule(request, Device.CPU)
        assert made is not None
        found[name] = made
    return found


def _draw(generator: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Floats from the normal distribution; of integers, which may be indices or masks, zeros and ones."""
    if dtype.startswith(("float", "bfloat")):
        return generator.standard_normal(shape, np.float32).astype(dtype)
    return generator.integers(0, 2, shape).astype(dtype)
