"""Precision: which kernels multiply bf16 or tf32 instead of float32 numbers, or read and write float16.

A kernel multiplies bf16 numbers if the target has instructions that multiply bf16 operands and accumulate in
float32 for it, unless rounding its operands was measured to change its result by more than `rounding_error`,
or fp32 is predicted to be faster. Tensors between two bf16 kernels are stored as bf16 (`bf16_storage.py`).

With tf32 the same holds for the tensor cores of a GPU, which round float32 operands that they read.

A kernel reads and writes float16 unless rounding all of that was measured to change its result by more
(`narrow_storage.py`); its arithmetic stays float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import tvm
from tvm import relax, s_tir, tirx
from tvm_ffi import structural_equal

from hybridc.machine import BF16_SPEEDUP, Processor
from hybridc.options import BF16, FP16, INT8, TF32
from hybridc.passes.precision.bf16_storage import keep_in_bf16
from hybridc.passes.precision.small_tensors import SMALL_BYTES
from hybridc.passes.program.prim_funcs import FunctionTable
from hybridc.passes.program.program import Program, called_function, tensor_shape
from hybridc.passes.schedule import schedule_requests
from hybridc.schedules.cpu.core.attention import read_attention
from hybridc.schedules.cpu.core.dot_products import bf16_is_faster
from hybridc.schedules.cpu.core.nest import Nest, read_block, read_integer_contraction
from hybridc.schedules.cpu.low_precision import bf16_wgrad1d, bf16_wgrad2d
from hybridc.schedules.cpu.low_precision.bf16_conv1d import (
    filtering_is_faster,
    floats_are_faster,
    fourier_is_faster,
    line_data,
    read_bf16_line,
)
from hybridc.schedules.cpu.low_precision.bf16_conv2d import read_bf16_convolution, winograd_is_faster
from hybridc.schedules.cpu.low_precision.bf16_matmul import read_bf16_product
from hybridc.schedules.cpu.packed.bf16_rows import bf16_dot
from hybridc.schedules.cpu.packed.few_rows import FEW_ROWS
from hybridc.schedules.cpu.packed.read import Packed, read_packed
from hybridc.schedules.cpu.packed.rounded_rows import accepts_rounded_rows
from hybridc.schedules.cpu.wgrad.fourier import is_by_transforms
from hybridc.schedules.cuda.tensor_core.tensor_core import read_tf32_product, tf32_is_faster
from hybridc.schedules.rule import PRECISION, PRECISION_NOTE, Request
from hybridc.targets import DEFAULT_THREADS, Target


@dataclass(frozen=True, slots=True)
class Factors:
    """Positions of the arguments that a function multiplies."""

    left: int
    right: int
    is_gradient: bool = False
    """Whether the result is a gradient of weights."""
    in_floats: str = ""
    """Why they are multiplied in fp32 all the same, by a kernel that gains from bf16 in memory."""
    reads_bf16: bool = True
    """Whether the kernel can read a left factor that is bf16 in memory."""


Errors = Callable[[Program, Mapping[str, Collection[int]]], Mapping[str, float]]
"""How much rounding these parameters, by position, changes what each function gives: the Euclidean norm of
the change over that of the result, of the worst call. Results come behind arguments."""


def reduce_precision(
    program: Program,
    target: Target,
    rounding_error: float,
    errors: Errors,
    *,
    winograd: bool = True,
    int8_activations: bool = True,
    threads: int = DEFAULT_THREADS,
    speedup: float = BF16_SPEEDUP,
    functions: FunctionTable | None = None,
) -> Program:
    """Mark functions for bf16. `speedup` is of packed lanes on vectors over multiply-adds of floats.

    Requires: `program` fused, with the same `functions`, if they are given: they get what is made; a target
    that multiplies bf16 numbers.
    Ensures: functions that sum products have the attribute PRECISION if they may round their operands, else
    PRECISION_NOTE, which says why not. Without a GPU, tensors that only bf16 functions write and read are
    bf16.
    Raises: what `errors` raises.
    """
    read = _bf16_reader(program, target, winograd, threads, speedup, int8_activations)
    factors, notes = _rounded_factors(program, read, rounding_error, errors)
    reduced = marked(program, BF16, factors, notes)
    if target.has_gpu:
        return reduced  # either device may run a kernel, and the GPU's read floats
    data = {name: f.left for name, f in factors.items() if f.reads_bf16 and not f.is_gradient}
    return keep_in_bf16(reduced, data, functions)


def reduce_step_precision(
    program: Program,
    target: Target,
    *,
    winograd: bool = True,
    threads: int = DEFAULT_THREADS,
    speedup: float = BF16_SPEEDUP,
) -> tuple[Program, frozenset[relax.Var]]:
    """Mark functions of a training step for bf16; and the variables that may be stored as bf16 for them.

    Requires, Ensures: as `reduce_precision`, but nothing is measured, and no tensor is bf16 yet. Whatever is
    multiplied so loses nothing for these products where it is stored as bf16 (`store_narrow`): activations
    and their gradients are, unless they are small; gradients of weights, which nothing multiplies, are not.
    What Fourier transforms in fp32 read and write is among them: half as many bytes pass between them and
    memory. On vectors that multiply bf16 no faster than floats nothing is marked: nothing would pay for
    packing factors in each step. The target has no GPU (`gpu_step.py`).
    Raises: nothing of its own.
    """
    found = _found(program, _bf16_reader(program, target, winograd, threads, speedup))
    factors, notes = _rounded_and_not(found)
    in_floats = {name: f for name, f in found.items() if isinstance(f, Factors) and f.in_floats}
    if not bf16_is_faster(target.isa, speedup):
        notes |= dict.fromkeys(factors, "this processor multiplies bf16 no faster than fp32")
        factors = {}
    rounded = set[relax.Var]()
    for binding in program.bindings:
        read = (factors | in_floats).get(called_function(binding))
        if read is not None:
            arguments = binding.value.args[1].fields
            rounded |= {arguments[read.left], arguments[read.right]}
        if read is not None and read.in_floats and not read.is_gradient:
            rounded.add(binding.var)
    large = (v for v in rounded if 4 * math.prod(tensor_shape(v)) > SMALL_BYTES)
    return marked(program, BF16, factors, notes), frozenset(large)


def _bf16_reader(
    program: Program,
    target: Target,
    winograd: bool,
    threads: int,
    speedup: float,
    int8_activations: bool = True,
) -> Callable[[str], Factors | str]:
    requests = schedule_requests(
        program, target, winograd=winograd, int8_activations=int8_activations, threads=threads
    )

    def read(name: str) -> Factors | str:
        function = program.module[name].with_attr(PRECISION, BF16)
        return _factors(replace(requests[name], function=function, bf16_speedup=speedup))

    return read


def multiply_tf32(
    program: Program,
    target: Target,
    rounding_error: float,
    errors: Errors,
    gpu: Processor,
    *,
    winograd: bool = True,
) -> Program:
    """Mark functions for tf32.

    Requires: `program` fused, a target whose GPUs all have tf32.
    Ensures: as `reduce_precision`. Those that are estimated to be as fast in float32 on `gpu` stay so.
    Raises: what `errors` raises.
    """
    requests = schedule_requests(program, target, winograd=winograd, gpu=gpu)
    factors, notes = _rounded_factors(
        program, lambda name: _tf32_factors(requests[name]), rounding_error, errors
    )
    return marked(program, TF32, factors, notes)


def _rounded_factors(
    program: Program, read: Callable[[str], Factors | str], rounding_error: float, errors: Errors
) -> tuple[Mapping[str, Factors], Mapping[str, str]]:
    """The factors of the products that may be rounded, and why those of others may not, by function."""
    factors, notes = _rounded_and_not(_found(program, read))
    positions = {name: (value.left, value.right) for name, value in factors.items()}
    for name, error in errors(program, positions).items():
        if not error <= rounding_error:
            del factors[name]
            notes[name] = f"rounding the factors would change the result by {error:.2g} of it"
    return factors, notes


def _found(program: Program, read: Callable[[str], Factors | str]) -> dict[str, Factors | str]:
    """The factors of all products, or why they have none, by function."""
    called = dict.fromkeys(filter(None, map(called_function, program.bindings)))
    return {name: read(name) for name in called if adds_up_products(program.module[name])}


def _rounded_and_not(found: Mapping[str, Factors | str]) -> tuple[dict[str, Factors], dict[str, str]]:
    """The factors of the products that have a kernel, and why others have none, by function."""
    factors, notes = dict[str, Factors](), dict[str, str]()
    for name, value in found.items():
        if isinstance(value, Factors) and not value.in_floats:
            factors[name] = value
        else:
            notes[name] = value if isinstance(value, str) else value.in_floats
    return factors, notes


def choose_halves(program: Program, rounding_error: float, errors: Errors) -> tuple[Program, frozenset[str]]:
    """Choose the functions whose tensors may be float16.

    Requires: `program` fused.
    Ensures: the functions that may, by name; others that read or write float32 have the attribute
    PRECISION_NOTE, which says why not. Masks of attention stay float32 (`attention_masks`).
    Raises: what `errors` raises.
    """
    called = dict.fromkeys(filter(None, map(called_function, program.bindings)))
    floats = {
        name: [i for i, p in enumerate(program.module[name].params) if str(p.dtype) == "float32"]
        for name in called
    }
    floats = {
        name: [i for i in positions if i not in attention_masks(program.module[name])]
        for name, positions in floats.items()
    }
    found = errors(program, {name: positions for name, positions in floats.items() if positions})
    notes = {
        name: "what it reads or writes exceeds the range of float16"
        if math.isinf(error)
        else f"rounding what it reads and writes would change the result by {error:.2g} of it"
        for name, error in found.items()
        if not error <= rounding_error
    }
    return marked(program, FP16, (), notes), frozenset(found.keys() - notes.keys())


def attention_masks(function: tirx.PrimFunc) -> frozenset[int]:
    """Positions of the masks of an attention, which hide keys by numbers beyond the range of float16; empty
    for any other function."""
    found = read_attention(function)
    return frozenset() if found is None else found.masks


def adds_up_products(function: tirx.PrimFunc) -> bool:
    """Whether a function has a reduction that adds a product of two numbers, not a square, to a sum."""
    schedule = s_tir.Schedule(function)
    blocks = [schedule.get(block) for block in schedule.get_child_blocks(schedule.get_sblock("root"))]
    found = [read_block(block) for block in blocks]
    values = [block.value for block in found if block is not None and block.reduce]
    summands = [value.b for value in values if isinstance(value, tirx.Add)]
    return any(isinstance(s, tirx.Mul) and not structural_equal(s.a, s.b) for s in summands)


def _factors(request: Request) -> Factors | str:
    """The factors that are rounded to bf16, or why the function stays in fp32."""
    conv = read_bf16_convolution(request)
    if conv is not None:
        if winograd_is_faster(request, conv):
            return "Winograd's algorithm in fp32 is predicted to be faster"
        nest = conv.contraction.nest
        return _positions(nest, conv.data, nest.function.params[conv.weight])
    line = read_bf16_line(request)
    if line is not None:
        data = line_data(line)
        assert data is not None
        factors = _positions(line.contraction.nest, data[0], line.weight.source)
        if fourier_is_faster(request, line):
            return _with(factors, in_floats="Fourier transforms in fp32 are predicted to be faster")
        if filtering_is_faster(request, line):
            return "Winograd's algorithm in fp32 is predicted to be faster"
        if floats_are_faster(line, request.target.isa, request.threads):
            return "fp32 is predicted to be faster"
        return factors
    for kind in (bf16_wgrad1d, bf16_wgrad2d):
        wgrad = kind.read_wgrad(request)
        if wgrad is not None:
            factors = _positions(wgrad.contraction.nest, wgrad.gradient, wgrad.data)
            if kind.floats_are_faster(request, wgrad):
                reason = "fp32 is predicted to be faster"
                return (
                    _with(factors, is_gradient=True, in_floats=reason)
                    if is_by_transforms(request)
                    else reason
                )
            return _with(factors, is_gradient=True)
    packed = read_packed(request.function)
    if packed is not None:
        return _packed_factors(request, packed)
    product = read_bf16_product(request)
    if product is None:
        return "no bf16 kernel computes this"
    return _positions(product.contraction.nest, product.left.source, product.right.source)


def _packed_factors(request: Request, packed: Packed) -> Factors | str:
    """Rounding the scales changes the weights as much as rounding these, in the worst case."""
    if accepts_rounded_rows(packed, request):
        return "its rows are rounded to 8 bits"
    if packed.rows <= FEW_ROWS:
        return "few rows wait for memory"
    if bf16_dot(packed, request) is None:
        return "no bf16 kernel computes this, or none is faster"
    factors = _positions(packed.contraction.nest, packed.contraction.left.source, packed.scales)
    return factors if isinstance(factors, str) else replace(factors, reads_bf16=False)


def _with(factors: Factors | str, *, is_gradient: bool = False, in_floats: str = "") -> Factors | str:
    """The same factors, if there are any, of such a kernel."""
    if isinstance(factors, str):
        return in_floats or factors
    return replace(factors, is_gradient=is_gradient, in_floats=in_floats)


def _tf32_factors(request: Request) -> Factors | str:
    """The factors that are rounded to tf32, or why the function stays in fp32."""
    product = read_tf32_product(request)
    if product is None:
        return "no kernel for tensor cores computes this"
    if not tf32_is_faster(product, request):
        return "fp32 is predicted to be faster"
    left, right = product.operands
    return Factors(left, right)


def _positions(nest: Nest, left: tirx.Var, right: tirx.Var) -> Factors | str:
    positions = nest.parameter(left), nest.parameter(right)
    if positions[0] is None or positions[1] is None:
        return "what it multiplies is computed in the same kernel"
    return Factors(positions[0], positions[1])


def mark_integers(program: Program, *, with_notes: bool = True) -> Program:
    """Mark functions that multiply integers.

    Requires: `program` fused, after the rules of `passes/precision/quantized.py`.
    Ensures: functions that sum products have the attribute PRECISION if they multiply 8-bit integers, else
    PRECISION_NOTE, unless there are to be no notes.
    Raises: nothing of its own.
    """
    functions = {g.name_hint: f for g, f in program.functions.items()}
    if not with_notes and not any("int8_" in name for name in functions):
        return program
    products = {name for name, function in functions.items() if adds_up_products(function)}
    integers = {name for name in products if read_integer_contraction(functions[name]) is not None}
    floats = products - integers if with_notes else ()
    notes = dict.fromkeys(floats, "the factors are not both quantized, or no int8 kernel computes this")
    return marked(program, INT8, integers, notes)


def marked(program: Program, precision: str, reduced: Collection[str], notes: Mapping[str, str]) -> Program:
    """The program with the attributes of functions that are `reduced`, and of others the notes on why not."""
    functions: dict[tvm.ir.GlobalVar, relax.Function | tirx.PrimFunc] = {}
    for variable, function in program.module.functions.items():
        name = variable.name_hint
        if name in reduced:
            function = function.with_attr(PRECISION, precision)
        elif name in notes:
            function = function.with_attr(PRECISION_NOTE, notes[name])
        functions[variable] = function
    return Program(tvm.IRModule(functions), program.weights, program.origins)
