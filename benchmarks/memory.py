"""Arena bytes over the live-bytes lower bound, for our planner and for TVM's, without running anything.

    python benchmarks/memory.py

TVM's figure is `StaticPlanBlockMemory` on the very same fused kernels. Exits with 1 if one of our
arenas is above 1.01 times its bound.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import tvm
from common import LIGHT_MODELS, OWN_MODELS, suite_model, write_result
from tvm import relax

from hybridc.ir.graph import dtype_bits
from hybridc.options import CompileOptions, parse_budgets
from hybridc.passes.import_model import import_model
from hybridc.passes.pipeline import run_stages
from hybridc.progress import NullProgress
from hybridc.targets import parse_target

LIMIT = 1.01
CONFIGURATIONS = (("avx512", None), ("cuda+avx2", "100%"), ("cuda+avx2", "50%"), ("cuda+avx2", "25%"))


def main() -> int:
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for name in (*LIGHT_MODELS, *OWN_MODELS):
        model = suite_model(name)
        for target, budget in CONFIGURATIONS:
            options = CompileOptions(
                target=parse_target(target), gpu_memory=parse_budgets(budget) if budget else ()
            )
            done = run_stages(import_model(model, options)[1], NullProgress(), stop_after="verify")
            for arena in done.plans[0].arenas:
                ratio = arena.size_bytes / arena.lower_bound_bytes if arena.lower_bound_bytes else 1.0
                rows.append(
                    {
                        "model": name,
                        "target": target,
                        "budget": budget,
                        "device": arena.device.value,
                        "arena_bytes": arena.size_bytes,
                        "lower_bound_bytes": arena.lower_bound_bytes,
                        "ratio": round(ratio, 4),
                    }
                )
                print(rows[-1], flush=True)
        tvm_bytes, bound_bytes = tvm_plan(done.whole.program.module)
        rows.append(
            {
                "model": name,
                "planner": "tvm StaticPlanBlockMemory",
                "arena_bytes": tvm_bytes,
                "lower_bound_bytes": bound_bytes,
                "ratio": round(tvm_bytes / bound_bytes, 4),
            }
        )
        print(rows[-1], flush=True)
    print("written to", write_result("memory", rows))
    return 0 if all(row["ratio"] <= LIMIT for row in rows if "planner" not in row) else 1


def tvm_plan(module: tvm.IRModule) -> tuple[int, int]:
    """Bytes of the storages that TVM plans for a fused module, and the live-bytes bound of its tensors."""
    passes = relax.transform
    before = tvm.transform.Sequential(
        [
            passes.ConvertToDataflow(),
            passes.RewriteDataflowReshape(),
            passes.ToNonDataflow(),
            passes.RemovePurityChecking(),
            passes.CallTIRRewrite(),
        ]
    )(module)
    planned = passes.StaticPlanBlockMemory()(before)
    storages = [int(call.args[0].values[0]) for call in _calls(planned["main"], "relax.memory.alloc_storage")]
    return sum(storages), _live_bytes(before["main"])


def _calls(function: relax.Function, name: str) -> list[relax.Call]:
    values = [b.value for block in function.body.blocks for b in block.bindings]
    return [v for v in values if isinstance(v, relax.Call) and getattr(v.op, "name", "") == name]


def _live_bytes(function: relax.Function) -> int:
    """The most bytes that allocated tensors, views counted with what they see, hold at one binding.

    Tensors that are results of the function are not planned by TVM and not counted.
    """
    bindings = [b for block in function.body.blocks for b in block.bindings]
    root: dict[relax.Var, relax.Var] = {}
    first: dict[relax.Var, int] = {}
    last: dict[relax.Var, int] = {}
    for i, binding in enumerate(bindings):
        value = binding.value
        used = [root[v] for v in _variables(value) if v in root]
        for var in used:
            last[var] = i
        if isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.builtin.alloc_tensor":
            root[binding.var] = binding.var
            first[binding.var] = last[binding.var] = i
        elif used and isinstance(binding.var.ty, relax.TensorType):
            root[binding.var] = used[0]
    results = {root[v] for v in _variables(function.body.body) if v in root}
    planned = [v for v in first if v not in results]
    events = [0] * (len(bindings) + 2)
    for var in planned:
        size = math.prod(int(n) for n in var.ty.shape.values) * dtype_bits(str(var.ty.dtype.dtype)) // 8
        events[first[var]] += size
        events[last[var] + 1] -= size
    live = peak = 0
    for change in events:
        live += change
        peak = max(peak, live)
    return peak


def _variables(expr: relax.Expr) -> list[relax.Var]:
    found: list[relax.Var] = []
    relax.analysis.post_order_visit(expr, lambda e: found.append(e) if isinstance(e, relax.Var) else None)
    return found


if __name__ == "__main__":
    sys.exit(main())
