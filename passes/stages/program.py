"""Operators in the forms of later stages, and one function for each kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tvm import relax

from hybridc.machine import BF16_SPEEDUP
from hybridc.options import FP16, FP32, INT8, TF32
from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.canonicalize.sharing import LIMIT_BYTES, UNBUDGETED_LIMIT_BYTES, share_equal
from hybridc.passes.canonicalize.subnormals import drop_subnormal_weights
from hybridc.passes.fuse.attention import (
    Attention,
    Suits,
    any_attention,
    attention_operands,
    fuse_attention,
)
from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.fuse.heads import join_heads
from hybridc.passes.fuse.separable import fuse_separable
from hybridc.passes.layout.layout import choose_layout
from hybridc.passes.phases import (
    FusedNetwork,
    ImportedNetwork,
)
from hybridc.passes.precision.gpu_step import reduce_gpu_step_precision
from hybridc.passes.precision.integer_caches import store_integer_caches
from hybridc.passes.precision.narrow_storage import store_narrow
from hybridc.passes.precision.precision import (
    choose_halves,
    mark_integers,
    multiply_tf32,
    reduce_precision,
    reduce_step_precision,
)
from hybridc.passes.precision.quantized import (
    DEQUANTIZED_RULES,
    has_quantized_activations,
    has_quantized_tensors,
    multiply_integers,
    quantized_rules,
)
from hybridc.passes.precision.requantize import requantize
from hybridc.passes.precision.wide_program import in_float32
from hybridc.progress import Progress
from hybridc.schedules.cuda.attention.attention import is_suitable

_EXACT_PRODUCTS = (FP32, INT8)
"""Precisions with which products of what a quantizer wrote are made of integers, as their sums are exact."""


def canonicalize_network(c: ImportedNetwork, _: Progress) -> ImportedNetwork:
    """Rewrite operators to forms that later stages know. Raises ModelError as `canonicalize` does."""
    program, narrow = in_float32(c.program)
    options = c.job.options
    has_budget = options.target.has_gpu or options.host_memory_bytes is not None
    limit_bytes = LIMIT_BYTES if has_budget else UNBUDGETED_LIMIT_BYTES
    program = drop_subnormal_weights(share_equal(canonicalize(program), limit_bytes))
    return replace(c, program=program, narrow=narrow.joined(c.narrow))


def fuse_cpu_attention(c: ImportedNetwork, _: Progress) -> ImportedNetwork:
    """Where a CPU runs alone. Beside a GPU `fuse_network` does it, as tiles are those of the operators."""
    return c if c.job.options.target.has_gpu else replace(c, program=fuse_attention(c.program))


def choose_cpu_layout(c: ImportedNetwork, _: Progress) -> ImportedNetwork:
    """Where a CPU runs alone, as before."""
    options = c.job.options
    if options.target.has_gpu:
        return c
    isa = options.target.isa
    if not has_quantized_tensors(c.program):
        return replace(c, program=choose_layout(c.program, isa))
    if options.precision not in _EXACT_PRODUCTS:
        return replace(c, program=choose_layout(c.program, isa, DEQUANTIZED_RULES))
    rules = quantized_rules(options.cpu_threads, winograd=options.fast_algorithms)
    return replace(c, program=requantize(choose_layout(c.program, isa, rules)))


def fuse_network(c: ImportedNetwork, _: Progress) -> FusedNetwork:
    """One PrimFunc for each kernel. Raises ModelError HC150 for an operator that no kernel can compute."""
    target = c.job.options.target
    # not before the network is tiled: tiles are those of its operators
    whole, precision = c.program, c.job.options.precision
    if target.has_gpu and precision in _EXACT_PRODUCTS and has_quantized_activations(whole):
        whole = multiply_integers(whole, target.isa)
    if target.has_gpu:
        suits = gpu_attention(c)
        whole = join_heads(whole, attention_operands(whole, suits), c.library.weights)
        whole = fuse_attention(whole, suits)
    program = fuse(whole, c.library.table)
    return FusedNetwork(c.job, program, c.library, c.narrow, unfused=c.program)


def gpu_attention(c: ImportedNetwork) -> Suits:
    """Whether an attention of a network for both devices is one kernel."""
    options = c.job.options
    if c.narrow.integers:
        return any_attention  # nothing else reads rows of integers
    is_narrow = bool(c.narrow.nodes) or options.precision == FP16 or options.trains_in_bf16
    return partial(_has_attention_kernel, is_narrow=is_narrow)


def _has_attention_kernel(match: Attention, *, is_narrow: bool) -> bool:
    """Whether the GPU, too, has a schedule for it that is better than those of its operators."""
    return is_suitable(match.rows, match.depth, match.width, is_narrow=is_narrow)


def fuse_cpu_separable(c: FusedNetwork, _: Progress) -> FusedNetwork:
    """Where a CPU runs alone; after `fuse`, which has put their epilogues into both convolutions."""
    target = c.job.options.target
    if target.has_gpu:
        return c
    return replace(c, program=fuse_separable(c.program, target, c.job.options.cpu_threads, c.library.table))


def reduce_network_precision(c: FusedNetwork, _: Progress) -> FusedNetwork:
    """Mark functions that multiply bf16, tf32 or integers, where the options ask for it; store 16-bit floats,
    and caches in rows of integers. Raises UsageError HC539 for caches that cannot be stored so.

    Requires: for fp16 and tf32, and for bf16 unless any error is allowed, `job.rounding`.
    """
    options, program, halved, rounded = c.job.options, c.program, frozenset[str](), frozenset[relax.Var]()
    if options.precision == INT8:
        program = mark_integers(program)
    elif options.precision == FP32:
        program = mark_integers(program, with_notes=False)
    elif options.trains_in_bf16 and options.target.has_gpu:
        program, rounded = reduce_gpu_step_precision(
            program, options.target, options.machine.gpu, winograd=options.fast_algorithms
        )
    elif options.trains_in_bf16:
        program, rounded = reduce_step_precision(
            program,
            options.target,
            winograd=options.fast_algorithms,
            threads=options.cpu_threads,
            speedup=options.machine.cpu.bf16_speedup or BF16_SPEEDUP,
        )
    elif options.precision != FP32:
        if c.job.rounding is None:
            raise ValueError(f"{options.precision} needs a measurement of rounding errors")
        if options.precision == FP16:
            program, halved = choose_halves(program, options.rounding_error, c.job.rounding)
        elif options.precision == TF32:
            program = multiply_tf32(
                program,
                options.target,
                options.rounding_error,
                c.job.rounding,
                options.machine.gpu,
                winograd=options.fast_algorithms,
            )
        else:
            program = reduce_precision(
                program,
                options.target,
                options.rounding_error,
                c.job.rounding,
                winograd=options.fast_algorithms,
                int8_activations=options.int8_activations,
                threads=options.cpu_threads,
                speedup=options.machine.cpu.bf16_speedup or BF16_SPEEDUP,
                functions=c.library.table,
            )
    program = store_narrow(program, c.narrow, options.target, halved, rounded)
    return replace(c, program=store_integer_caches(program, c.narrow.integers))
