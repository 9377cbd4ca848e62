"""Weights too small to matter, which cost x86 processors more than a hundred cycles for each product."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from tvm import relax

from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import Program, count_uses, is_op
from hybridc.placeholders import is_placeholder

SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
CHUNK_BYTES = 1 << 20
"""Looked at together: stays in the L2 cache, and weights mapped from a file need no copy."""


def drop_subnormal_weights(program: Program) -> Program:
    """Make float32 weights of products and convolutions zero where they are subnormal (under 1.2e-38).

    A weight that anything else reads stays as it is. A sum of products changes by at most 1.2e-38 times the
    sum of the absolute inputs. Pruned and long-trained networks have many such weights.
    """
    uses, by_products = count_uses(program), Counter[relax.Var]()
    for binding in program.bindings:
        if has_fact(binding.value, Fact.CONVOLUTION) or is_op(binding.value, *_PRODUCTS):
            by_products.update(a for a in binding.value.args[:2] if isinstance(a, relax.Var))
    changed = {
        var.name: _without_subnormals(value)
        for var, count in by_products.items()
        if count == uses[var]
        and (value := program.weights.get(var.name)) is not None
        and value.dtype == np.float32
        and not is_placeholder(value)
        and _has_subnormals(value)
    }
    return replace(program, weights={**program.weights, **changed}) if changed else program


_PRODUCTS = ("matmul", "nn.conv1d_transpose", "nn.conv2d_transpose", "nn.conv3d_transpose")


def _has_subnormals(value: np.ndarray) -> bool:
    """Whether there are any. The least absolute value decides, but where it is a zero."""
    parts = max(1, min(value.nbytes // CHUNK_BYTES, len(value)))
    return any(_is_any_subnormal(np.abs(part)) for part in np.array_split(value, parts))


def _is_any_subnormal(magnitudes: np.ndarray) -> bool:
    least = magnitudes.min(initial=np.inf)
    return bool(least < SMALLEST_NORMAL and ((magnitudes > 0) & (magnitudes < SMALLEST_NORMAL)).any())


def _without_subnormals(value: np.ndarray) -> np.ndarray:
    return np.where(np.abs(value) < SMALLEST_NORMAL, np.float32(0), value)
