"""FlexGen's linear programme for OPT-30B on a T4 (Sheng et al., ICML 2023), and our plan with its constants.

The programme divides weights, the cache of keys and values, and hidden states among GPU, host and disk, such
that a block of batches passes through all layers in the least time. Constants are those that its authors
fitted for a T4 (`experimental/cost_model.py` of their repository). They charge the copy of a layer's weights
before all else; our planner decides which weights stay and lets copies run beside kernels, with the same
speeds. Reading the prompts takes as long as theirs; its memory is not planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybridc.ir import Device, Graph, Kernel, Role, Tensor
from hybridc.machine import Link, Machine, Processor
from hybridc.passes.planner.bounds.linear import LinearProgramme, Term, minimise
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.model.context import Effort

GIB = 1 << 30
PUBLISHED_TOKENS_PER_S = 7.32
"""Measured by its authors: their README, with 144 sequences and all caches on the host."""
PROMPT, TOKENS = 512, 32
LAYERS, HIDDEN, INNER, HEADS = 48, 7168, 28672, 56
"""Of OPT-30B."""
BATCH, BATCHES = 48, 3
"""The authors' policy, with a fifth of the weights on the GPU."""
SHARE_OF_WEIGHTS = 0.2
UP, DOWN_CACHE, DOWN_HIDDEN = 12.89 * GIB, 0.97 * GIB, 4.82 * GIB
"""Bytes a second to the GPU, and from it."""
DISK_READ, DISK_CACHE, DISK_WRITE = 0.473 * GIB, 0.746 * GIB, 2.015 * GIB
PREFILL_FLOPS, PREFILL_ATTENTION_FLOPS = 21.24e12, 9.97e12
FLOPS, ATTENTION_FLOPS, CPU_FLOPS = 4.3e12, 0.079e12, 0.0123e12
CPU_FALLS = (0.0168, 0.0328, 0.0621)
"""How the CPU's speed falls with small batches and small hidden states."""
GPU_BYTES, HOST_BYTES, DISK_BYTES = 16 * GIB, 200 * GIB, 1500 * GIB
LAYER_BYTES = 8 * HIDDEN**2 + 4 * HIDDEN * INNER


@dataclass(frozen=True, slots=True)
class Policy:
    """What the programme finds for a block of batches."""

    batch: int
    batches: int
    prefill_s: float
    token_s: float
    """Of a layer each."""

    @property
    def tokens_per_s(self) -> float:
        seconds = LAYERS * (self.prefill_s + (TOKENS - 1) * self.token_s)
        return self.batch * self.batches * TOKENS / seconds


def rows(seconds: float) -> Iterator[dict[str, Any]]:
    """The published figure, the programme's with the authors' policy and with its own, and ours."""
    theirs = solve(BATCH, BATCHES, 1.2, SHARE_OF_WEIGHTS)
    assert theirs is not None, "the authors' policy fits"
    best = best_policy()
    ours_s = generation_s(BATCH * BATCHES, 0.8 * GPU_BYTES, seconds)
    ours = BATCH * BATCHES * TOKENS / (LAYERS * theirs.prefill_s + (TOKENS - 1) * ours_s)
    yield {
        "experiment": "FlexGen OPT-30B on a T4",
        "unit": "tokens/s",
        "published": PUBLISHED_TOKENS_PER_S,
        "their_policy_by_their_model": theirs.tokens_per_s,
        "their_programme_repeated": best.tokens_per_s,
        "their_programme_policy": f"{best.batches} x {best.batch}",
        "ours": ours,
    }


def best_policy() -> Policy:
    """Over sizes of batches, as the authors' script goes through them, with 80 % of each memory."""
    found: list[Policy] = []
    for batch in (1, 2, 3, 4, 8, 16, 32, 64, 128):
        slower = False
        for batches in range(1, 512):
            policy = solve(batch, batches, 0.8)
            if policy is None or slower:
                break
            slower = bool(found) and policy.tokens_per_s < found[-1].tokens_per_s and batches > 1
            found.append(policy)
    return max(found, key=lambda policy: policy.tokens_per_s)


def solve(batch: int, batches: int, usable: float, on_gpu: float | None = None) -> Policy | None:
    """The programme for one block; None if it does not fit the usable shares of the memories.

    With `on_gpu`, a share of the weights, all else is the authors' policy: nothing on the disk, caches and
    hidden states on the host.
    """
    rows, block = LinearProgramme(), batch * batches
    length, middle, wide = PROMPT + TOKENS, PROMPT + TOKENS / 2, 2 * HIDDEN * block
    fixed = on_gpu is not None
    share = lambda value: rows.variable(*((value, value) if fixed else (0.0, 1.0)))  # noqa: E731
    weights = tuple(map(share, (on_gpu or 0.0, 1 - (on_gpu or 0.0), 0.0)))
    cache = tuple(map(share, (0.0, 1.0, 0.0)))
    hidden = tuple(map(share, (0.0, 1.0)))
    prefill = rows.variable(0, 1e4, LAYERS / block)
    token = rows.variable(0, 1e4, (TOKENS - 1) * LAYERS / block)
    for parts in (weights, cache, hidden):
        rows.at_least([(part, 1.0) for part in parts], 1.0)
        rows.at_most([(part, 1.0) for part in parts], 1.0)

    def behind(end: int, terms: list[Term], seconds: float = 0.0) -> None:
        rows.at_least([(end, 1.0), *((v, -factor) for v, factor in terms)], seconds)

    def within(size: float, terms: list[Term], fixed_bytes: float = 0.0) -> None:
        rows.at_most([(v, factor / GIB) for v, factor in terms], (size * usable - fixed_bytes) / GIB)

    streamed = [(part, LAYER_BYTES / UP) for part in weights[1:]]
    kept = 2 * wide  # bytes of keys and values for each position
    behind(prefill, [*streamed, (hidden[1], PROMPT * wide / UP), (weights[2], LAYER_BYTES / DISK_READ)])
    down = [(part, (PROMPT + 1) * kept / DOWN_CACHE) for part in cache[1:]]
    behind(
        prefill,
        [*down, (hidden[1], PROMPT * wide / DOWN_HIDDEN), (cache[2], (PROMPT + 1) * kept / DISK_CACHE)],
    )
    layer_flops = block * (8 * HIDDEN**2 + 4 * HIDDEN * INNER)
    attended = 4 * block * PROMPT**2 * HIDDEN
    behind(prefill, [], PROMPT * layer_flops / PREFILL_FLOPS + attended / PREFILL_ATTENTION_FLOPS)
    first = [*streamed, (hidden[1], wide / UP)]
    behind(token, [*first, (hidden[1], wide / DOWN_HIDDEN)])
    read = [(cache[2], middle * kept / DISK_READ), (weights[2], LAYER_BYTES / (0.95 * DISK_READ))]
    behind(token, [*first, *read])
    behind(token, [*first, (cache[2], kept / DISK_WRITE)])
    attention = [(cache[0], middle * kept / ATTENTION_FLOPS)]
    attention += [(part, middle * kept / cpu_flops(batch)) for part in cache[1:]]
    behind(token, [*first, *attention], layer_flops / FLOPS)
    # bytes on the GPU while the prompt is read, and at the last token
    own = 2 * HIDDEN * batch
    working = batch * PROMPT * (20 * HIDDEN + 2 * INNER) + 2 * batch * HEADS * PROMPT**2
    resident = [(weights[0], LAYER_BYTES * (LAYERS - 2.0)), (cache[0], length * kept * LAYERS)]
    within(
        GPU_BYTES, [*resident, (hidden[0], PROMPT * (wide - own))], 2 * LAYER_BYTES + PROMPT * own + working
    )
    scratch = batch * (4 * HIDDEN + 4 * length * HIDDEN + 2 * HEADS * length) + 2 * length * own
    within(
        GPU_BYTES,
        [*resident, (cache[0], scratch), (hidden[0], wide - own)],
        2 * LAYER_BYTES + own + batch * (14 * HIDDEN + 2 * INNER),
    )
    home = [(weights[1], float(LAYER_BYTES * LAYERS)), (weights[0], -float(LAYER_BYTES))]
    within(
        HOST_BYTES,
        [*home, (hidden[1], PROMPT * wide), (hidden[0], -PROMPT * own), (cache[1], PROMPT * kept * LAYERS)],
        LAYER_BYTES + PROMPT * own,
    )
    buffers = [(weights[2], float(LAYER_BYTES)), (cache[2], 4 * length * own)]
    within(
        HOST_BYTES,
        [
            (weights[1], float(LAYER_BYTES * LAYERS)),
            (hidden[1], wide),
            (cache[1], length * kept * LAYERS),
            *buffers,
        ],
        2 * HEADS * length * batch + own,
    )
    within(DISK_BYTES, [(weights[2], float(LAYER_BYTES * LAYERS)), (cache[2], length * kept * LAYERS)])
    found = minimise(rows)
    if not found.is_optimal or not found.values.size:
        return None
    return Policy(batch, batches, float(found.values[prefill]), float(found.values[token]))


def cpu_flops(batch: int) -> float:
    """Of attention on the CPU: it falls with small batches and hidden states."""
    small, narrow = max(0.0, math.log2(64 / batch)), max(0.0, math.log2(4096 / HIDDEN))
    both, one, other = CPU_FALLS
    return CPU_FLOPS * max(0.1, 1 + both * small * narrow - one * small - other * narrow)


def generation_s(sequences: int, budget_bytes: float, seconds: float) -> float:
    """Predicted seconds of our plan for one token of each sequence: products on the GPU, attention on the
    CPU, where the caches are, with the authors' speeds."""
    graph, times_us = generation(sequences)
    down_gb_s = DOWN_HIDDEN / 1e9
    machine = Machine(
        "t4",
        Processor("gpu", 1, 320, 0, GPU_BYTES),
        Processor("cpu", 1, 1e6, 0, HOST_BYTES),  # the fitted speeds have what the host's memory does
        Link(UP / 1e9, down_gb_s, 0),
        measured_us=times_us,
    )
    plan = make_plan(graph, machine, int(budget_bytes), (Device.GPU, Device.CPU), effort=Effort(seconds))
    return plan.makespan_us / 1e6


def generation(sequences: int) -> tuple[Graph, dict[tuple[str, Device], float]]:
    """One token through all layers: products before attention, attention, products after it."""
    hidden_bytes = 2 * HIDDEN * sequences
    tensors = [Tensor("x", (hidden_bytes,), "uint8", Role.INPUT)]
    kernels: list[Kernel] = []
    before, after = 6 * HIDDEN**2, 2 * HIDDEN**2 + 4 * HIDDEN * INNER

    def kernel(name: str, function: str, source: str, weight_bytes: int, width: int, device: Device) -> str:
        inputs = [source]
        if weight_bytes:
            tensors.append(Tensor(f"{name}_w", (weight_bytes,), "uint8", Role.WEIGHT))
            inputs.append(f"{name}_w")
        tensors.append(Tensor(name, (width * hidden_bytes,), "uint8", Role.ACTIVATION))
        moved = weight_bytes + (1 + width) * hidden_bytes
        kernels.append(Kernel(name, function, tuple(inputs), (name,), (), 1, moved, 0, 0, (device,), (name,)))
        return name

    value = "x"
    for layer in range(LAYERS):
        value = kernel(f"qkv{layer}", "qkv", value, before, 3, Device.GPU)
        value = kernel(f"attention{layer}", "attention", value, 0, 1, Device.CPU)
        value = kernel(f"mlp{layer}", "mlp", value, after, 1, Device.GPU)
    positions = PROMPT + TOKENS / 2
    times_us = {
        ("qkv", Device.GPU): sequences * before / FLOPS * 1e6,
        ("mlp", Device.GPU): sequences * after / FLOPS * 1e6,
        ("attention", Device.CPU): 4 * sequences * positions * HIDDEN / cpu_flops(BATCH) * 1e6,
    }
    return Graph(tuple(kernels), tuple(tensors), ("x",), (value,)), times_us
