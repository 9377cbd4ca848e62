"""What a program does with a session, told in plain values: hybridc's must tell what hybridc-runtime's does.

    python session_use.py BUNDLE

prints it of hybridc-runtime, as JSON, with what loading took. Needs numpy alone.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

SHAPE = (4, 8)
Load = Callable[..., Any]


def use(load: Load, path: str) -> dict[str, Any]:
    """Everything that a session of `tests.support.artifacts.cpu_model` does."""
    with load(path, threads=2) as session:
        told = {
            "ports": [[str(port), asdict(port)] for port in (*session.get_inputs(), *session.get_outputs())],
            "model": asdict(session.get_modelmeta()),
            "buckets": [asdict(bucket) for bucket in session.buckets()],
            "memory": {str(device): asdict(memory) for device, memory in session.memory().items()},
            "threads": session.threads,
            "runs": _runs(session),
            "bindings": _bindings(session),
            "async": _async(session),
            "refused": _refused(session),
            "threads agree": _from_threads(session, load, path),
        }
        session.warm_up()
        spans = session.measure(_feeds(0))
        told["steps"] = [0 <= begin <= end for begin, end in spans]
    told["closed"] = [
        _code(lambda: session.run(None, _feeds(0))),
        _code(lambda: session.run_async(None, _feeds(0))),
        _code(session.memory),
    ]
    session.close()
    told["not loaded"] = [
        _code(lambda: load("/nowhere")),
        _code(lambda: load(path, threads=0)),
        _code(lambda: load(path, threads=True)),
        _code(lambda: load(path, threads=1 << 40)),
        _code(lambda: load(path, host_memory_bytes=1)),
    ]
    return told


def _x(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)


def _feeds(seed: int) -> dict[str, Any]:
    return {"the/x": _x(seed)}


def _told(arrays: list[np.ndarray]) -> list[Any]:
    return [[array.dtype.name, array.shape, array.tobytes().hex()] for array in arrays]


def _runs(session: Any) -> list[Any]:
    """All outputs, some in another order, and feeds that are no contiguous arrays of the machine's order."""
    x = _x(1)
    wide = np.zeros((4, 16), np.float32)
    wide[:, ::2] = x
    feeds: tuple[Any, ...] = (x, np.asfortranarray(x), x.astype(">f4"), wide[:, ::2], x[::-1][::-1])
    all_told = [_told(session.run(["out/0"], {"the/x": feed})) for feed in feeds]
    names = ["out/2", "out/0", "out/2"]
    return [*all_told, _told(session.run(None, _feeds(2))), _told(session.run(names, _feeds(2)))]


def _bindings(session: Any) -> list[Any]:
    binding, x = session.io_binding(), _x(3)
    y, strided = np.zeros((4, 6), np.float32), np.zeros((8, 12), np.float32)
    binding.bind_input("the/x", x)
    binding.bind_output("out/0", y)
    binding.bind_output("out/1", strided[:, ::2])
    binding.bind_output("out/2")
    told: list[Any] = [_code(binding.get_outputs)]
    for seed in (4, 5):
        x[...] = _x(seed)
        session.run_with_iobinding(binding)
        told += [_told(binding.copy_outputs_to_cpu()), binding.get_outputs()[0] is y, _told([y, strided])]
    for wrong in (np.zeros((4, 6)), np.zeros((6, 4), np.float32)):
        binding.bind_output("out/0", wrong)
        told.append(_code(lambda: session.run_with_iobinding(binding)))
    y.flags.writeable = False
    told += [_code(lambda: binding.bind_output("out/0", y)), _code(lambda: binding.bind_input("the/x", [1]))]
    binding.clear_binding_outputs()
    binding.clear_binding_inputs()
    told += [binding.get_outputs(), _code(lambda: session.run_with_iobinding(binding))]
    return told


def _async(session: Any) -> list[Any]:
    told: list[Any] = []

    def note(outputs: list[np.ndarray], user_data: object, error: str) -> None:
        told.append([_told(outputs), user_data, error])

    futures = [session.run_async(["out/0"], _feeds(seed), note, seed) for seed in range(3)]
    results = [_told(future.result()) for future in futures]
    failed = session.run_async(["y"], _feeds(0), note, "failed")
    told_code = _code(failed.result)
    last = session.run_async([], _feeds(0))
    last.result()
    return [results, told_code, told]


def _refused(session: Any) -> list[Any]:
    x = _x(0)
    uses: tuple[Callable[[], object], ...] = (
        lambda: session.run(None, {}),
        lambda: session.run(None, [x]),
        lambda: session.run(None, {"z": x}),
        lambda: session.run(None, {1: x}),
        lambda: session.run(None, {"the/x\0": x}),
        lambda: session.run(None, {"the/x": x, "z": x}),
        lambda: session.run(None, {"the/x": x.astype(np.float64)}),
        lambda: session.run(None, {"the/x": x.T}),
        lambda: session.run(None, {"the/x": x[0]}),
        lambda: session.run(None, {"the/x": np.float32(1)}),
        lambda: session.run(None, {"the/x": None}),
        lambda: session.run(None, {"the/x": [[1], [1, 2]]}),
        lambda: session.run(None, {"the/x": "text"}),
        lambda: session.run("out/0", {"the/x": x}),
        lambda: session.run(["y"], {"the/x": x}),
        lambda: session.run([0], {"the/x": x}),
        lambda: session.run(3, {"the/x": x}),
    )
    return [_code(each) for each in uses]


def _code(action: Callable[[], object]) -> Any:
    """What an error says, but for its place, and numbers that are written with commas or without."""
    try:
        action()
    except Exception as error:
        code, what = getattr(error, "code", type(error).__name__), getattr(error, "what", str(error))
        return [code, what if code not in ("HC301", "HC408") else "", getattr(error, "exit_code", None)]
    return None


def _from_threads(shared: Any, load: Load, path: str) -> bool:
    """Two threads, a session that both use, and one of each."""
    failures: list[int] = []

    def work(seed: int) -> None:
        with load(path) as own:
            [expected] = own.run(["out/0"], _feeds(seed))
            for number in range(100):
                [y] = (shared if number % 2 else own).run(["out/0"], _feeds(seed))
                if y.tobytes() != expected.tobytes():
                    failures.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return not failures


def main(path: str) -> None:
    start = time.perf_counter()
    import hybridc_runtime

    imported = time.perf_counter()
    with hybridc_runtime.load(path) as session:
        session.run(None, _feeds(0))
    ready = time.perf_counter()
    seconds = {"import": imported - start, "load and first run": ready - imported}
    print(json.dumps({"seconds": seconds, "used": use(hybridc_runtime.load, path)}))


if __name__ == "__main__":
    main(sys.argv[1])
