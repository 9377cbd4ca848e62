"""The CUDA example of the guide is a rule that works."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from hybridc import emulator
from hybridc.codegen.cuda_callback import cuda_compiler
from hybridc.schedules.cuda.core.launch import cuda_target
from hybridc.schedules.rule import Request
from hybridc.targets import parse_target
from tests.support.emulated import compile_for_emulator
from tests.support.fusion import fused_operators
from tests.support.guide import rule_of_guide

TARGET = parse_target("cuda:sm_80+avx2")


def test_example_schedules_a_matrix_with_a_block_of_threads_a_row() -> None:
    x = np.random.default_rng(21).standard_normal((3, 300)).astype("f4")
    function = fused_operators(lambda e, x: e(relax.op.nn.relu(x)), [x.shape], "float32")
    scheduled = rule_of_guide("row_blocks")(Request(function, frozenset(), TARGET))
    assert scheduled is not None
    emulator.start(64 << 20)
    with cuda_compiler(compile_for_emulator):
        named = scheduled.function.with_attr("global_symbol", "kernel")
        target = tvm.target.Target(cuda_target(TARGET), host="llvm")
        library = tvm.compile(tvm.IRModule({"kernel": named}), target=target)
    device = tvm.cuda(0)
    result = tvm.runtime.empty(x.shape, "float32", device)
    library["kernel"](tvm.runtime.tensor(x, device), result)
    device.sync()
    np.testing.assert_array_equal(result.numpy(), np.maximum(x, 0))
