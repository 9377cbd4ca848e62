"""Sessions in threads and in child processes: the rows of the table in docs/usage.md.

Each test starts programs of its own, so that all but those of a plain fork are slow ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridc.ir import Device, Graph, Kernel, Role
from hybridc.schedules.rule import Scheduled
from tests.support.artifacts import CPU_TARGET, Model, PlanBuilder, parallel_scale, tensor
from tests.support.process import PATIENCE_SECONDS

SHAPE = (64, 64)
CHILDS_PATIENCE_SECONDS = PATIENCE_SECONDS / 2  # so that the program itself says what hangs

PROGRAM = """
import multiprocessing, os, signal, sys, threading, time
from concurrent.futures import ProcessPoolExecutor
import numpy as np
import hybridc

PATH, EMULATED = sys.argv[1], None if sys.argv[2] == "cpu" else "1MiB"

def load():
    return hybridc.load(PATH, threads=2, emulate_gpu=EMULATED)

def fed(session, seed=0):
    [port] = session.get_inputs()
    return {{port.name: np.random.default_rng(seed).standard_normal(port.shape).astype("f4")}}

def result(session, seed=0):
    return session.run(None, fed(session, seed))[0]

def loaded(seed):
    with load() as session:
        return result(session, seed)

def inherited(seed):
    return result(parents, seed)

def ended(child):
    # The exit status of a child, which is killed if it hangs.
    end = time.monotonic() + {patience}
    while time.monotonic() < end:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"

def told(function, *arguments):
    # What it returns, or the code of its error.
    try:
        return function(*arguments)
    except hybridc.HybridcError as error:
        return error.code

if __name__ == "__main__":
    {body}
"""

RUN_FIRST = """
    parents = load()
    expected = [result(parents, seed) for seed in range(4)]
    time.sleep({pause})  # until idle workers sleep
"""
RUN_LAST = """
    assert np.array_equal(result(parents, 1), expected[1]), "the parent goes on"
    parents.close()
"""


def program_text(body: str) -> str:
    return PROGRAM.format(body=body.strip(), patience=CHILDS_PATIENCE_SECONDS)


@pytest.fixture(scope="session")
def parallel_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y = 3 * x on the CPU, in a loop over threads."""
    x, y = tensor("x", Role.INPUT, SHAPE), tensor("y", Role.OUTPUT, SHAPE)
    graph = Graph((Kernel("k0", "scale", ("x",), ("y",)),), (x, y), ("x",), ("y",))
    builder = PlanBuilder()
    builder.run("k0", Device.CPU)
    builder.hold(x, Device.CPU, -1, 0)
    builder.hold(y, Device.CPU, 0, 1)
    functions = {("scale", Device.CPU): Scheduled(parallel_scale(3, SHAPE), "parallel")}
    model = Model(graph, builder.plan(), functions, CPU_TARGET)
    return model.write(tmp_path_factory.mktemp("parallel") / "model.hyb")


@pytest.fixture(params=["cpu", "gpu"])
def artifact(request: pytest.FixtureRequest, parallel_artifact: Path, hybrid_artifact: Path) -> list[str]:
    """What a program is told: an artifact for the CPU, then one for the GPU, an emulated one here."""
    return [str(parallel_artifact if request.param == "cpu" else hybrid_artifact), request.param]


def run(folder: Path, artifact: list[str], body: str, *, pause: float = 0.1) -> None:
    """Run a program that loads an artifact, runs it, does `body` and runs it again; it must end by itself."""
    text = program_text(RUN_FIRST.format(pause=pause) + body + RUN_LAST)
    program = folder / "program.py"
    program.write_text(text)
    done = subprocess.run(
        [sys.executable, str(program), *artifact],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_fresh_processes_work(tmp_path: Path, artifact: list[str], method: str) -> None:
    body = f"""
    with ProcessPoolExecutor(2, multiprocessing.get_context("{method}")) as pool:
        assert np.array_equal(list(pool.map(loaded, range(4))), expected)
    """
    run(tmp_path, artifact, body)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["loaded", "inherited"])
def test_forked_pool_works_on_the_cpu_and_is_refused_the_gpu(
    tmp_path: Path, artifact: list[str], way: str
) -> None:
    body = f"""
    def done(seed):
        return pool.submit({way}, seed).result(timeout={CHILDS_PATIENCE_SECONDS})
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        if EMULATED:
            assert told(done, 0) == "HC559"
        else:
            assert all(np.array_equal(done(seed), expected[seed]) for seed in range(4))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = told(pool.apply_async({way}, (2,)).get, {CHILDS_PATIENCE_SECONDS})
        assert found == "HC559" if EMULATED else np.array_equal(found, expected[2])
    """
    run(tmp_path, artifact, body)


@pytest.mark.parametrize("end", [pytest.param("os._exit(7)", marks=pytest.mark.slow), "sys.exit(7)"])
@pytest.mark.parametrize("pause", [0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_forked_process_ends_as_it_wants(tmp_path: Path, artifact: list[str], end: str, pause: float) -> None:
    body = f"""
    child = os.fork()
    if child == 0:
        for function in (loaded, inherited):
            found = told(function, 3)
            if not (found == "HC559" if EMULATED else np.array_equal(found, expected[3])):
                os._exit(1)
        {end}
    assert ended(child) == 7
    """
    run(tmp_path, artifact, body, pause=pause)


@pytest.mark.slow
def test_process_forked_before_the_gpu_is_used_may_use_it(tmp_path: Path, artifact: list[str]) -> None:
    body = """
    pass
    """
    first = """
    child = os.fork()
    if child == 0:
        loaded(0)
        sys.exit(7)
    assert ended(child) == 7
    """
    program = tmp_path / "program.py"
    program.write_text(program_text(first + RUN_FIRST.format(pause=0) + body + RUN_LAST))
    done = subprocess.run([sys.executable, str(program), *artifact], timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0


@pytest.mark.slow
def test_fork_while_other_threads_run(tmp_path: Path, artifact: list[str]) -> None:
    body = """
    stopped, statuses = threading.Event(), []
    def go_on():
        while not stopped.is_set():
            result(parents, 1)
    threads = [threading.Thread(target=go_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        child = os.fork()
        if child == 0:
            found = told(inherited, 2)
            right = found == "HC559" if EMULATED else np.array_equal(found, expected[2])
            os._exit(0 if right else 1)
        statuses.append(ended(child))
    stopped.set()
    for thread in threads:
        thread.join()
    assert statuses == [0] * 10
    """
    run(tmp_path, artifact, body)


def test_runs_that_are_not_waited_for_go_on_in_a_forked_process(
    tmp_path: Path, parallel_artifact: Path
) -> None:
    body = """
    begun = parents.run_async(None, fed(parents, 1)).result()[0]
    child = os.fork()
    if child == 0:
        found = parents.run_async(None, fed(parents, 3)).result(10)[0]
        os._exit(7 if np.array_equal(found, expected[3]) else 1)
    assert np.array_equal(begun, expected[1]) and ended(child) == 7
    assert np.array_equal(parents.run_async(None, fed(parents, 2)).result()[0], expected[2])
    """
    run(tmp_path, [str(parallel_artifact), "cpu"], body)


@pytest.mark.slow
def test_fork_of_a_fork_works_on_the_cpu(tmp_path: Path, parallel_artifact: Path) -> None:
    body = """
    child = os.fork()
    if child == 0:
        first = np.array_equal(inherited(0), expected[0])
        grandchild = os.fork()
        if grandchild == 0:
            sys.exit(3 if np.array_equal(inherited(1), expected[1]) else 1)
        sys.exit(4 if first and ended(grandchild) == 3 and np.array_equal(inherited(2), expected[2]) else 2)
    assert ended(child) == 4
    """
    run(tmp_path, [str(parallel_artifact), "cpu"], body)


def test_closing_in_a_forked_process_leaves_the_parents_session_alone(
    tmp_path: Path, artifact: list[str]
) -> None:
    body = """
    child = os.fork()
    if child == 0:
        parents.release()
        parents.close()
        sys.exit(7)
    assert ended(child) == 7
    """
    run(tmp_path, artifact, body)


@pytest.mark.slow
def test_threads_share_a_session(tmp_path: Path, artifact: list[str]) -> None:
    body = """
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(4) as pool:
        assert np.array_equal(list(pool.map(inherited, range(4))), expected)
    """
    run(tmp_path, artifact, body)


def test_emulated_gpu_of_the_parent_cannot_be_started_again(tmp_path: Path, hybrid_artifact: Path) -> None:
    body = """
    from hybridc import emulator
    child = os.fork()
    if child == 0:
        os._exit(0 if told(emulator.start, 1 << 20) == "HC559" else 1)
    assert ended(child) == 0
    """
    run(tmp_path, [str(hybrid_artifact), "gpu"], body)


@pytest.mark.slow
def test_interrupted_child_ends_soon(tmp_path: Path, parallel_artifact: Path) -> None:
    body = """
    ready, begin = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            inherited(0)
            os.write(begin, b"!")
            while True:
                inherited(0)
        except KeyboardInterrupt:
            sys.exit(7)
    os.read(ready, 1)
    os.kill(child, signal.SIGINT)
    assert ended(child) == 7
    """
    run(tmp_path, [str(parallel_artifact), "cpu"], body)
