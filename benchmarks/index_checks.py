"""What a check of fed indices and divisors costs: kernels with their checks against the same without.

    python benchmarks/index_checks.py [--seconds 3] [--isa avx2]

Without: the function as its rule scheduled it, its markers replaced by what they stand for. Both versions are
called in turn on sets of operands that together exceed the caches; the least times are compared: what else
runs on the machine only adds to others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import tvm
from common import write_result
from tvm import relax

from hybridc.ir import Device
from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.program.program import ProgramBuilder
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.select import rules, schedule
from hybridc.targets import ISAS, Target, native_isa
from hybridc.tuning.measure import TimedKernel, call_times_ms, compiled, use_threads
from tests.support.programs import unchecked

CACHE_BYTES = 256 << 20
THREADS = 1
op = relax.op

Build = Callable[..., relax.Expr]
CASES: dict[str, tuple[Build, tuple[tuple[int, ...], ...], tuple[str, ...]]] = {
    "Gather rows of 768 (embedding)": (
        lambda x, i: op.take(x, i, 0, mode="wrap"),
        ((30522, 768), (8, 128)),
        ("float32", "int64"),
    ),
    "Gather columns": (
        lambda x, i: op.take(x, i, 1, mode="wrap"),
        ((512, 4096), (1024,)),
        ("float32", "int64"),
    ),
    "GatherElements": (
        lambda x, i: op.gather_elements(x, i, 1),
        ((512, 4096), (512, 2048)),
        ("float32", "int64"),
    ),
    "GatherND points": (op.gather_nd, ((512, 4096), (1 << 20, 2)), ("float32", "int64")),
    "GatherND rows of 64": (op.gather_nd, ((4096, 64), (1 << 14, 1)), ("float32", "int64")),
    "ScatterElements": (
        lambda x, i, u: op.scatter_elements(x, i, u, 1),
        ((512, 4096), (512, 2048), (512, 2048)),
        ("float32", "int64", "float32"),
    ),
    "ScatterND rows of 64": (
        lambda x, i, u: op.scatter_nd(x, i, u),
        ((4096, 64), (4096, 1), (4096, 64)),
        ("float32", "int64", "float32"),
    ),
    "Div int32": (op.divide, ((1 << 20,), (1 << 20,)), ("int32", "int32")),
    "Div int64": (op.divide, ((1 << 20,), (1 << 20,)), ("int64", "int64")),
    "Mod int64": (op.floor_mod, ((1 << 20,), (1 << 20,)), ("int64", "int64")),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--isa", default=native_isa().name, choices=ISAS)
    options = parser.parse_args(arguments)
    target = Target((), ISAS[options.isa])
    use_threads(THREADS)
    rows = []
    for name, (build, shapes, dtypes) in CASES.items():
        request = _request(build, shapes, dtypes, target)
        checked = schedule(request, Device.CPU)
        assert checked is not None
        operands = _operand_sets(request, len(shapes), divides="Div" in name or "Mod" in name)
        kernels = [
            TimedKernel(
                compiled(version, target.isa),
                [[*tensors, *_faults(version)] for tensors in operands],
            )
            for version in (checked, _trusting(request))
        ]
        with_checks, without = (min(times) for times in call_times_ms(kernels, options.seconds))
        row = {
            "kernel": name,
            "isa": options.isa,
            "checked_us": round(with_checks * 1e3, 2),
            "unchecked_us": round(without * 1e3, 2),
            "cost_percent": round((with_checks / without - 1) * 100, 2),
        }
        print(row, flush=True)
        rows.append(row)
    print("written to", write_result("index_checks", rows))
    return 0


def _request(
    build: Build, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], target: Target
) -> Request:
    pairs = zip(shapes, dtypes, strict=True)
    inputs = [relax.Var(f"p{i}", relax.TensorType(*pair)) for i, pair in enumerate(pairs)]
    builder = ProgramBuilder(inputs)
    result = builder.emit(build(*inputs), ("node",), "y")
    [function] = fuse(builder.finish([result])).functions.values()
    return Request(function, frozenset(), target, threads=THREADS)


def _trusting(request: Request) -> Scheduled:
    """As the rule schedules the function, without checks and without what keeps positions inside."""
    for rule in rules(Device.CPU):
        made = rule(request)
        if made is not None:
            function = unchecked(tvm.IRModule({"main": made.function}))["main"]
            return replace(made, function=function.without_attr("checks"))
    raise AssertionError("the fallback accepts everything")


def _operand_sets(request: Request, inputs: int, *, divides: bool) -> list[list[tvm.runtime.Tensor]]:
    """Operands and results, more of them than caches hold. Indices are legal for every axis of the table."""
    random = np.random.default_rng(0)
    parameters = request.function.params
    shapes = [tuple(int(n) for n in p.shape) for p in parameters]
    limit = 100 if divides else min(n for n in shapes[0] if n > 1)

    def array(position: int) -> np.ndarray:
        dtype = str(parameters[position].dtype)
        if not dtype.startswith("int"):
            return random.standard_normal(shapes[position], np.float32)
        return random.integers(1 if divides else -limit, limit, shapes[position]).astype(dtype)

    made = [[tvm.runtime.tensor(array(i)) for i in range(len(parameters))]]
    size = sum(np.prod(shape) * 4 for shape in shapes)
    for _ in range(int(CACHE_BYTES // size)):
        made.append([tvm.runtime.tensor(array(i)) for i in range(len(parameters))])
    return made


def _faults(scheduled: Scheduled) -> list[tvm.runtime.Tensor]:
    if not scheduled.has_checks:
        return []
    last = scheduled.function.params[-1]
    return [tvm.runtime.tensor(np.zeros([int(n) for n in last.shape], "int64"))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
