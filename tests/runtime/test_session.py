"""Sessions on the CPU: manners, feeds, memory, several at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridc.errors import UsageError
from hybridc.ir import Device
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.runtime import load
from tests.support.artifacts import SHAPE, cpu_model, negate, scheduled, weight_array
from tests.support.process import becomes_true, running_threads

W = weight_array((8, 6))


def drawn(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)


def expected(x: np.ndarray) -> np.ndarray:
    return np.maximum(x.astype(np.float64) @ W, 0)


def test_interface_is_described_like_onnxruntime(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session:
        inputs, outputs = session.get_inputs(), session.get_outputs()
    assert [(i.name, i.shape, i.type) for i in inputs] == [("the/x", [4, 8], "tensor(float)")]
    assert [o.name for o in outputs] == ["out/0", "out/1", "out/2"]


def test_session_and_artifact_are_told_in_one_line(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session:
        assert repr(session).startswith(f"<Session {cpu_artifact.name}: the/x [4, 8] -> out/0 [")
        assert repr(session.artifact).endswith(", 1 of 1>") and len(repr(session.artifact)) < 120


def test_outputs_come_in_the_order_asked_for(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session:
        x, y = session.run(["out/2", "out/0"], {"the/x": drawn()})
    np.testing.assert_array_equal(x, drawn())
    np.testing.assert_allclose(y, expected(drawn()), rtol=1e-5, atol=1e-5)


def test_output_may_be_a_weight_or_an_input(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session:
        _, w, x = session.run(None, {"the/x": drawn()})
    np.testing.assert_array_equal(w, W)
    np.testing.assert_array_equal(x, drawn())


def test_outputs_of_an_earlier_run_are_not_overwritten(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session:
        first = session.run(["out/0"], {"the/x": drawn(0)})[0]
        session.run(["out/0"], {"the/x": drawn(1)})
    np.testing.assert_allclose(first, expected(drawn(0)), rtol=1e-5, atol=1e-5)


def test_feed_that_is_not_contiguous_is_accepted(cpu_artifact: Path) -> None:
    strided = np.asfortranarray(np.repeat(drawn(), 2, axis=1))[:, ::2]
    assert not strided.flags.c_contiguous
    with load(cpu_artifact) as session:
        y = session.run(["out/0"], {"the/x": strided})[0]
    np.testing.assert_allclose(y, expected(drawn()), rtol=1e-5, atol=1e-5)


def test_feed_of_the_other_byte_order_is_converted(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session:
        y, x = session.run(["out/0", "out/2"], {"the/x": drawn().astype(">f4")})
    np.testing.assert_allclose(y, expected(drawn()), rtol=1e-5, atol=1e-5)
    assert x.dtype.isnative
    np.testing.assert_array_equal(x, drawn())


@pytest.mark.parametrize(
    ("code", "outputs", "feeds"),
    [
        ("HC551", None, {"the/x": drawn(), "z": drawn()}),
        ("HC552", None, {}),
        ("HC553", None, {"the/x": drawn().astype(np.float64)}),
        ("HC554", None, {"the/x": drawn().T}),
        ("HC555", ["y"], {"the/x": drawn()}),
    ],
)
def test_wrong_request_is_refused_and_says_what_was_expected(
    cpu_artifact: Path, code: str, outputs: list[str] | None, feeds: dict[str, np.ndarray]
) -> None:
    with load(cpu_artifact) as session, pytest.raises(UsageError) as caught:
        session.run(outputs, feeds)
    assert caught.value.code == code
    assert "'the/x'" in str(caught.value) or "'out/0'" in str(caught.value)


def test_closed_session_refuses_to_run_and_can_be_closed_again(cpu_artifact: Path) -> None:
    session = load(cpu_artifact)
    session.close()
    session.close()
    with pytest.raises(UsageError, match="closed") as caught:
        session.run(None, {"the/x": drawn()})
    assert caught.value.code == "HC556"


@pytest.mark.parametrize("threads", [0, -1, True])
def test_impossible_number_of_threads_is_refused(cpu_artifact: Path, threads: int) -> None:
    with pytest.raises(UsageError) as caught:
        load(cpu_artifact, threads=threads)
    assert caught.value.code == "HC557"


def test_allocated_bytes_are_the_planned_ones(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session:
        memory = session.memory()
    assert memory[Device.GPU].allocated_bytes == memory[Device.GPU].planned_bytes == 0
    assert memory[Device.CPU].allocated_bytes == memory[Device.CPU].planned_bytes == 2 * ALIGNMENT_BYTES
    assert (
        memory[Device.CPU].mapped_weight_bytes == 2 * W.nbytes
    )  # packed for the kernel, plain for the output


def test_two_sessions_keep_their_data_apart(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as one, load(cpu_artifact, threads=1) as two:
        first = one.run(["out/0"], {"the/x": drawn(0)})[0]
        second = two.run(["out/0"], {"the/x": drawn(1)})[0]
    np.testing.assert_allclose(first, expected(drawn(0)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(second, expected(drawn(1)), rtol=1e-5, atol=1e-5)


def test_artifact_compiled_anew_at_the_same_path_is_loaded_anew(tmp_path: Path) -> None:
    model, x = cpu_model(), drawn(0)
    with load(model.write(tmp_path / "model.hyb")) as session:
        np.testing.assert_allclose(session.run(["out/0"], {"the/x": x})[0], expected(x), rtol=1e-5, atol=1e-5)
    negating = {**model.functions, ("relu", Device.CPU): scheduled(negate((4, 6)), Device.CPU)}
    with load(replace(model, functions=negating).write(tmp_path / "model.hyb")) as session:
        np.testing.assert_allclose(session.run(["out/0"], {"the/x": x})[0], -(x @ W), rtol=1e-5, atol=1e-5)


def test_runs_from_several_threads_do_not_mix(cpu_artifact: Path) -> None:
    with load(cpu_artifact, threads=1) as session, ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda seed: session.run(["out/0"], {"the/x": drawn(seed)})[0], range(16)))
    for seed, result in enumerate(results):
        np.testing.assert_allclose(result, expected(drawn(seed)), rtol=1e-5, atol=1e-5)


def test_loading_imports_neither_tvm_nor_the_compiler(cpu_artifact: Path) -> None:
    script = """
import sys
import numpy as np
from hybridc.runtime import load
with load(sys.argv[1]) as session:
    y = session.run(["out/0"], {"the/x": np.ones((4, 8), np.float32)})[0]
assert y.shape == (4, 6)
unwanted = [m for m in sys.modules if m.split(".")[0] in ("tvm", "onnx") or m.startswith("hybridc.codegen")]
assert not unwanted, unwanted
"""
    done = subprocess.run([sys.executable, "-c", script, str(cpu_artifact)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("feeds", [None, [drawn()], drawn()])
def test_feeds_that_are_no_mapping_are_refused(cpu_artifact: Path, feeds: Any) -> None:
    with load(cpu_artifact) as session, pytest.raises(UsageError) as refusal:
        session.run(None, feeds)
    assert refusal.value.code == "HC551"


def test_ragged_feed_is_refused(cpu_artifact: Path) -> None:
    ragged: Any = [[1.0], [1.0, 2.0]]
    with load(cpu_artifact) as session, pytest.raises(UsageError) as refusal:
        session.run(None, {"the/x": ragged})
    assert refusal.value.code == "HC553"


def test_single_output_name_is_not_taken_for_its_letters(cpu_artifact: Path) -> None:
    with load(cpu_artifact) as session, pytest.raises(UsageError, match="must be a list") as refusal:
        session.run("out/0", {"the/x": drawn()})
    assert refusal.value.code == "HC555"


@pytest.mark.parametrize("names", [7, b"out/0", [["out/0"]], [None], [{}], iter(["out/0"])])
def test_names_of_outputs_that_are_none_are_refused(cpu_artifact: Path, names: Any) -> None:
    with load(cpu_artifact) as session, pytest.raises(UsageError) as refusal:
        session.run(names, {"the/x": drawn()})
    assert refusal.value.code == "HC555"


def test_short_lived_threads_leave_none_behind(cpu_artifact: Path) -> None:
    with load(cpu_artifact, threads=2) as session:

        def run() -> None:
            session.run(None, {"the/x": drawn()})

        def run_in_threads(count: int) -> None:
            for _ in range(count):
                thread = threading.Thread(target=run)
                thread.start()
                thread.join()

        run_in_threads(10)
        before = running_threads()
        run_in_threads(30)
        # lasting threads may still come up; a leak would be of 30
        assert becomes_true(lambda: len(running_threads() - before) <= 4)


def test_library_is_loaded_once_however_often_its_artifact_is(
    cpu_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(cpu_artifact).close()
    monkeypatch.setattr("tvm_ffi.load_module", None)
    with load(cpu_artifact) as session:
        assert len(session.run(None, {"the/x": drawn()})) == 3
