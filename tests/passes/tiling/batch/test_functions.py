"""What functions do with the samples of a batch, and functions of some of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx

import hybridc
from hybridc.passes.tiling.batch.functions import SUM, IsSummed, batch_function
from hybridc.passes.training.kernels.scatter import take_gradient
from tests.support.expansion import parsed
from tests.support.machines import EAGER_GPU

SHAPE = (6, 4)


def sized(*shape: int) -> list[tirx.IntImm]:
    return [tirx.IntImm("int64", extent) for extent in shape]


def function(body: Callable[[te.Tensor], te.Tensor]) -> tirx.PrimFunc:
    """Of one operand of `SHAPE`."""
    x = te.placeholder(sized(*SHAPE), "float32", "x")
    return te.create_prim_func([x, body(x)])


def over(extent: int) -> tirx.IterVar:
    return te.reduce_axis((0, tirx.IntImm("int64", extent)), "k")


def doubled(x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda n, c: x[n, c] + x[n, c], name="doubled")


def numbered(x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda n, c: x[n, c] + n.astype("float32"), name="numbered")


def transposed(x: te.Tensor) -> te.Tensor:
    return te.compute(sized(*SHAPE[::-1]), lambda c, n: x[n, c], name="transposed")


def added_up(x: te.Tensor) -> te.Tensor:
    k = over(SHAPE[0])
    return te.compute(sized(SHAPE[1]), lambda c: te.sum(x[k, c] * x[k, c], axis=k), name="added_up")


def largest(x: te.Tensor) -> te.Tensor:
    k = over(SHAPE[0])
    return te.compute(sized(SHAPE[1]), lambda c: te.max(x[k, c], axis=k), name="largest")


def reversed_samples(x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda n, c: x[SHAPE[0] - 1 - n, c], name="reversed_samples")


def centred(x: te.Tensor) -> te.Tensor:
    total = added_up(x)
    return te.compute(x.shape, lambda n, c: x[n, c] - total[c], name="centred")


@pytest.mark.parametrize("body, label", [(doubled, 0), (numbered, 0), (transposed, 1), (added_up, SUM)])
def test_result_has_samples_where_the_loop_over_them_writes(
    body: Callable[[te.Tensor], te.Tensor], label: int
) -> None:
    found = batch_function(function(body), {0: 0})
    assert found is not None
    assert found.labels == (0, label)
    assert found.counts == (body is numbered)


@pytest.mark.parametrize("body", [largest, reversed_samples])
def test_what_cannot_be_put_together_from_parts_is_left_whole(
    body: Callable[[te.Tensor], te.Tensor],
) -> None:
    assert batch_function(function(body), {0: 0}) is None


def test_function_whose_loops_were_written_by_hand_is_left_whole() -> None:
    gradient = take_gradient(1, 5, 8, SHAPE[0], "float32", "int64")
    assert batch_function(gradient, {0: 1, 1: 0}) is None


def test_function_that_uses_its_own_sum_says_so() -> None:
    with pytest.raises(IsSummed):
        batch_function(function(centred), {0: 0})


def test_operands_read_by_the_same_loop_have_samples_too() -> None:
    x, y, w = (te.placeholder(sized(*s), "float32", n) for s, n in ((SHAPE, "x"), ((6,), "y"), ((4,), "w")))
    out = te.compute(x.shape, lambda n, c: x[n, c] * w[c] + y[n], name="out")
    found = batch_function(te.create_prim_func([x, y, w, out]), {0: 0})
    assert found is not None and found.labels == (0, 0, None, 0)


def test_element_that_a_sample_chooses_is_the_samples_own() -> None:
    x, chosen = te.placeholder(sized(*SHAPE), "float32", "x"), te.placeholder(sized(6), "int64", "chosen")
    out = te.compute(chosen.shape, lambda n: x[n, chosen[n]], name="out")
    found = batch_function(te.create_prim_func([x, chosen, out]), {0: 0})
    assert found is not None and found.labels == (0, 0, 0)


@pytest.mark.parametrize("body", [doubled, numbered, transposed, added_up])
def test_parts_make_up_the_whole(body: Callable[[te.Tensor], te.Tensor]) -> None:
    whole = function(body)
    found = batch_function(whole, {0: 0})
    assert found is not None
    x = np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)
    parts = [run(found.of_samples(begin, end), x[begin:end]) for begin, end in ((0, 2), (2, 6))]
    label = found.labels[1]
    made = sum(parts) if label == SUM else np.concatenate(parts, axis=label)
    np.testing.assert_allclose(made, run(whole, x), rtol=1e-6)


def run(compiled: tirx.PrimFunc, x: np.ndarray) -> np.ndarray:
    executable = tvm.compile(tvm.IRModule({"main": compiled.with_attr("global_symbol", "main")}), "llvm")
    result = tvm.runtime.tensor(np.zeros([int(e) for e in compiled.params[1].shape], np.float32))
    executable["main"](tvm.runtime.tensor(x), result)
    return result.numpy()


def test_loop_of_no_constant_extent_is_left_whole(tmp_path: Path) -> None:
    """As those of TopK have along an axis that is taken for the samples."""
    text = """g (float[48] x) => (float[4] y, int64[4] i) {
        four = Constant<value = int64[1] {4}>()
        y, i = TopK(x, four)
    }"""
    options: dict[str, Any] = {"gpu_memory": "50%", "machine": EAGER_GPU, "plan_seconds": 0.05}
    hybridc.compile(parsed(text), tmp_path / "model.hyb", target="cuda:sm_80+avx2", **options)
