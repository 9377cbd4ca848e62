"""Addresses of compiled kernels against the same expressions in numpy."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from hybridc.errors import DeviceError
from hybridc.gpu_model.kernel import Buffer, Kernel, call, kernels_of
from hybridc.gpu_model.sass.interpreter import Interpreter

BLOCKS, THREADS, LIMIT = 5, (16, 3), 1 << 20
TEMPLATE = """
extern "C" __global__ void kernel{number}(const float *a, float *b, int n) {{
    const int x = threadIdx.x, y = threadIdx.y, z = blockIdx.x;
    b[({expression}) % {limit}] = a[n];
}}
"""


def expression(rng: random.Random, depth: int) -> str:
    """Of x, y, z and constants, in C: never negative, and less than 2^31 in all its parts."""
    if depth == 0:
        return rng.choice(["x", "y", "z", "n", str(rng.randrange(1, 100))])
    left, right = (expression(rng, depth - 1) for _ in range(2))
    constant = rng.choice([2, 3, 5, 7, 8, 11, 14, 49, 56, 112, 196, 1000])
    return rng.choice(
        [
            f"({left} + {right})",
            f"({left} % 1000 * ({right} % 1000))",
            f"({left} / {constant})",
            f"({left} % {constant})",
            f"({left} >> {rng.randrange(1, 5)})",
            f"({left} & {constant})",
            f"({left} < {right} ? {left} : {constant})",
            f"({left} ^ {right})",
            f"max({left}, {right})",
        ]
    )


def in_numpy(text: str) -> Callable[..., np.ndarray]:
    """The same for arrays: `c ? a : b` is the only thing that Python spells another way."""
    while "?" in text:
        at = text.index("?")
        begin = _matching(text, at, -1)
        end = _matching(text, at, 1)
        condition, rest = text[begin + 1 : at], text[at + 1 : end]
        colon = _colon(rest)
        text = f"{text[:begin]}where({condition}, {rest[:colon]}, {rest[colon + 1 :]}){text[end + 1 :]}"
    names = {"where": np.where, "max": np.maximum}
    return lambda **values: eval(text.replace("/", "//"), {**names, **values})


def _matching(text: str, at: int, step: int) -> int:
    depth = 0
    while True:
        at += step
        depth += {"(": 1, ")": -1}.get(text[at], 0) * step
        if depth < 0:
            return at


def _colon(text: str) -> int:
    depth = 0
    for place, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == ":" and depth == 0:
            return place
    raise ValueError(text)


def compiled(expressions: list[str], architecture: str) -> dict[str, Kernel]:
    return compiled_source(
        "".join(
            TEMPLATE.format(number=number, expression=text, limit=LIMIT)
            for number, text in enumerate(expressions)
        ),
        architecture,
    )


def compiled_source(source: str, architecture: str) -> dict[str, Kernel]:
    pytest.importorskip("cuda.bindings.nvrtc")
    from hybridc.codegen.cuda import compile_cubin

    try:
        return kernels_of(compile_cubin(source, architecture))
    except DeviceError as error:
        assert error.code == "HC432"
        pytest.skip("nvdisasm is not installed")


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90"])
def test_addresses_are_those_of_the_source(architecture: str) -> None:
    rng = random.Random(architecture)
    expressions = [expression(rng, 3) for _ in range(60)]
    kernels = compiled(expressions, architecture)
    block = (*THREADS, 1)
    x, y, z = (
        np.tile(np.arange(THREADS[0]), THREADS[1] * BLOCKS),
        np.tile(np.repeat(np.arange(THREADS[1]), THREADS[0]), BLOCKS),
        np.repeat(np.arange(BLOCKS), THREADS[0] * THREADS[1]),
    )
    for number, text in enumerate(expressions):
        launch = call(kernels[f"kernel{number}"], (BLOCKS, 1, 1), block, [Buffer(4), Buffer(4 * LIMIT), 77])
        run = Interpreter(launch.kernel.code, launch.launch, [(k, 0, 0) for k in range(BLOCKS)]).run()
        stores = [s.addresses for s in run if s.instruction.opcode == "STG" and s.addresses is not None]
        expected = in_numpy(text)(x=x, y=y, z=z, n=77) % LIMIT * 4
        base = 2 << 40  # the second buffer
        assert (stores[0] - base == expected).all(), f"{text}\n{launch.kernel.code}"


@pytest.mark.parametrize(
    ("condition", "turns"), [("<= -1e38f", 0), ("> -1e38f", 7), (">= 0.5f", 0), ("< 2.f", 7)]
)
def test_loops_end_where_zeros_would_end_them(condition: str, turns: int) -> None:
    """What is loaded counts as zero."""
    source = f"""
extern "C" __global__ void kernel(const float *a, float *b, int n) {{
    const int end = a[threadIdx.x] {condition} ? n : 0;
    for (int i = 0; i < end; ++i) b[threadIdx.x + 32 * i] = 1.f;
}}"""
    launch = call(
        compiled_source(source, "sm_86")["kernel"], (1, 1, 1), (32, 1, 1), [Buffer(128), Buffer(LIMIT), 7]
    )
    run = Interpreter(launch.kernel.code, launch.launch, [(0, 0, 0)]).run()
    stored = [s.active for s in run if s.instruction.opcode == "STG"]
    count = sum(32 if active is None else int(active.sum()) for active in stored)
    assert count == 32 * turns
