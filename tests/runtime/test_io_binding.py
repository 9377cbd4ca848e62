"""Runs on the caller's own arrays, and runs that are not waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridc.errors import DeviceError, UsageError
from hybridc.runtime import Session, load
from tests.runtime.test_session import drawn, expected


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_bound_arrays_are_read_and_filled_by_every_run(cpu_artifact: Path) -> None:
    x, y = drawn(0), np.empty((4, 6), np.float32)
    with load(cpu_artifact) as session:
        binding = session.io_binding()
        binding.bind_cpu_input("the/x", x)
        binding.bind_output("out/0", y)
        binding.bind_output("out/2")
        for seed in range(3):
            x[...] = drawn(seed)
            session.run_with_iobinding(binding)
            assert_close(y, expected(drawn(seed)))
            first, fed = binding.get_outputs()
            assert first is y and binding.copy_outputs_to_cpu()[0] is y
            np.testing.assert_array_equal(fed, x)
            assert not np.shares_memory(fed, x)


def test_columns_of_a_larger_array_are_filled_in_place(cpu_artifact: Path) -> None:
    whole = np.zeros((4, 12), np.float32)
    with load(cpu_artifact) as session:
        binding = session.io_binding()
        binding.bind_input("the/x", drawn(0))
        binding.bind_output("out/0", whole[:, ::2])
        session.run_with_iobinding(binding)
    assert_close(whole[:, ::2], expected(drawn(0)))
    assert not whole[:, 1::2].any()


def test_tensors_of_torch_pass_without_a_copy(cpu_artifact: Path) -> None:
    torch = pytest.importorskip("torch")
    x, y = torch.from_numpy(drawn(0).copy()), torch.empty((4, 6))
    with load(cpu_artifact) as session:
        binding = session.io_binding()
        binding.bind_input("the/x", x)
        binding.bind_output("out/0", y)
        session.run_with_iobinding(binding)
        assert_close(y.numpy(), expected(drawn(0)))
        x.neg_()
        session.run_with_iobinding(binding)
        assert_close(y.numpy(), expected(-drawn(0)))
        with pytest.raises(UsageError) as caught:
            binding.bind_input("the/x", x.to(torch.bfloat16))
    assert caught.value.code == "HC553"


class Pinned:
    """An array as libraries give those in memory that CUDA may copy from."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 3, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__()


def test_arrays_in_pinned_memory_are_read(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session:
        binding = session.io_binding()
        binding.bind_input("the/x", Pinned(drawn(0)))
        binding.bind_output("out/0")
        session.run_with_iobinding(binding)
        assert_close(binding.get_outputs()[0], expected(drawn(0)))


def test_an_output_that_is_bound_anew_has_no_result_yet(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session:
        binding = session.io_binding()
        binding.bind_input("the/x", drawn(0))
        for array in (None, np.empty((4, 6), np.float32), None):
            binding.bind_output("out/0", array)
            with pytest.raises(UsageError) as caught:
                binding.get_outputs()
            assert caught.value.code == "HC555"
            session.run_with_iobinding(binding)
            assert_close(binding.get_outputs()[0], expected(drawn(0)))


@pytest.mark.usefixtures("emulated_gpu")
def test_arrays_on_the_gpu_are_read_and_filled_there(hybrid_artifact: Path) -> None:
    import tvm

    x = drawn(0)
    with load(hybrid_artifact) as session:
        on_gpu = tvm.runtime.tensor(x, tvm.cuda(0))
        result = tvm.runtime.tensor(np.zeros(x.shape, np.float32), tvm.cuda(0))
        binding = session.io_binding()
        binding.bind_input("the/x", on_gpu)
        binding.bind_output("out/0", result)
        session.run_with_iobinding(binding)
        [wanted] = session.run(None, {"the/x": x})
        np.testing.assert_array_equal(result.numpy(), wanted)
        np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], wanted)
        assert binding.get_outputs()[0].__dlpack_device__() == result.__dlpack_device__()


def bound(session: Session, x: Any, y: Any) -> None:
    binding = session.io_binding()
    binding.bind_input("the/x", x)
    binding.bind_output("out/0", y)
    session.run_with_iobinding(binding)


@pytest.mark.parametrize(
    ("code", "x", "y"),
    [
        ("HC553", object(), None),
        ("HC553", drawn().astype(np.float64), None),
        ("HC554", drawn().T, None),
        ("HC553", drawn(), np.empty((4, 6))),
        ("HC554", drawn(), np.empty((6, 4), np.float32)),
        ("HC553", drawn(), np.broadcast_to(np.float32(0), (4, 6))),
        ("HC553", drawn(), np.empty((4, 6), ">f4")),
    ],
)
def test_what_does_not_fit_is_refused(cpu_artifact: Path, code: str, x: Any, y: Any) -> None:
    with load(cpu_artifact) as session, pytest.raises(UsageError) as caught:
        bound(session, x, y)
    assert caught.value.code == code


def test_names_and_missing_results_are_told(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session:
        binding = session.io_binding()
        binding.bind_output("out/0")
        for attempt, code in (
            (binding.get_outputs, "HC555"),
            (lambda: session.run_with_iobinding(binding), "HC552"),
        ):
            with pytest.raises(UsageError) as caught:
                attempt()
            assert caught.value.code == code
        binding.bind_output("z")
        with pytest.raises(UsageError) as caught:
            session.run_with_iobinding(binding)
        assert caught.value.code == "HC555"
        binding.clear_binding_outputs()
        binding.clear_binding_inputs()
        assert binding.get_outputs() == []


def test_asynchronous_runs_come_back_in_order(cpu_artifact: Path) -> None:
    told: list[tuple[object, int, str]] = []
    done = threading.Event()

    def callback(outputs: list[np.ndarray], user_data: object, error: str) -> None:
        told.append((user_data, len(outputs), error.partition(":")[0]))
        if user_data == "last":
            done.set()

    with load(cpu_artifact) as session:
        futures = [session.run_async(["out/0"], {"the/x": drawn(seed)}, callback, seed) for seed in range(5)]
        failed = session.run_async(None, {}, callback, "last")
        for seed, future in enumerate(futures):
            assert_close(future.result()[0], expected(drawn(seed)))
        with pytest.raises(UsageError):
            failed.result()
        assert done.wait(10)
    assert told == [*((seed, 1, "") for seed in range(5)), ("last", 0, "error[HC552]")]
    with pytest.raises(UsageError) as caught:
        session.run_async(None, {"the/x": drawn()})
    assert caught.value.code == "HC556"


def test_closing_drops_runs_that_have_not_begun(cpu_artifact: Path) -> None:
    session, begun, go_on = load(cpu_artifact), threading.Event(), threading.Event()

    def hold(outputs: list[np.ndarray], user_data: object, error: str) -> None:
        begun.set()
        go_on.wait(10)

    session.run_async(None, {"the/x": drawn()}, hold)
    assert begun.wait(10)
    told: list[str] = []
    waiting, dropped = (
        session.run_async(None, {"the/x": drawn()}, lambda outputs, data, error: told.append(error))
        for _ in range(2)
    )
    assert waiting.cancel()
    session.close()
    go_on.set()
    assert dropped.cancelled() and told == ["the run was cancelled before it began"] * 2


def test_threads_used_up_are_not_taken_for_a_closed_session(
    cpu_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with load(cpu_artifact) as session, monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(DeviceError) as caught:
            session.run_async(None, {"the/x": drawn()})
    assert caught.value.code == "HC412"


def test_warming_up_changes_no_result(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session:
        session.warm_up()
        [y] = session.run(["out/0"], {"the/x": drawn()})
    assert_close(y, expected(drawn()))


@pytest.mark.usefixtures("emulated_gpu")
def test_warming_up_makes_cuda_graphs(hybrid_artifact: Path) -> None:
    from hybridc import emulator

    with load(hybrid_artifact) as session:
        session.warm_up()
        before = emulator.statistics().graph_launches
        session.run(None, {"the/x": drawn()})
        assert emulator.statistics().graph_launches > before


def test_warming_up_forgives_a_divisor_of_zero(cpu_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(code: str) -> Callable[..., list[np.ndarray]]:
        def run(*feeds: object) -> list[np.ndarray]:
            raise UsageError(code, "refused")

        return run

    with load(cpu_artifact) as session:
        monkeypatch.setattr(session, "run", refusing("HC560"))
        session.warm_up(1)
        monkeypatch.setattr(session, "run", refusing("HC556"))
        with pytest.raises(UsageError):
            session.warm_up(1)


def test_metadata_name_the_model_and_what_compiled_it(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session:
        meta = session.get_modelmeta()
    assert (meta.producer_name, meta.graph_name) == ("hybridc", "hand.onnx")
    assert meta.custom_metadata_map["opset"] == "18" and meta.custom_metadata_map["target"] == "avx2"
