"""Networks as an older hybridc and this one compile them, under the same model of GPU times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_model.suite import kernels_of_network, save_network
from hybridc.codegen.cuda import compile_cubin
from hybridc.errors import UsageError
from hybridc.gpu_model.chip import chip_of
from hybridc.gpu_model.estimate import estimate
from hybridc.gpu_model.kernel import Buffer, Call, call, kernels_of
from hybridc.machine import Processor
from hybridc.scratch import scratch_folder

_EXPORT = Path(__file__).parent / "checkout_kernels.py"


def compared(
    networks: Sequence[str], checkout: Path, processors: Sequence[Processor]
) -> Iterator[dict[str, Any]]:
    """A row for each network on each GPU: microseconds of kernels and of their launches, before and now.

    The old code has float32 alone: a network in 16 bits is compared with what that makes of it. Raises
    UsageError HC530 where the checkout cannot export a network's kernels.
    """
    exported: dict[str, dict[str, Any]] = {}
    for network in networks:
        plain = network.partition("@")[0]
        if plain not in exported:
            exported[plain] = _export(plain, checkout)
        for processor in processors:
            old = priced(calls_of(exported[plain], processor), processor)
            new = priced([(k.calls, k.launches) for k in kernels_of_network(network, processor)], processor)
            yield {
                "network": network,
                "gpu": processor.name,
                **{f"old_{name}": value for name, value in old.items()},
                **new,
                "times_better": round(_whole(old) / _whole(new), 2),
            }


def _whole(times: dict[str, float]) -> float:
    return times["us"] + times["launch_us"]


def priced(functions: Sequence[tuple[int, Sequence[Call]]], processor: Processor) -> dict[str, float]:
    """Of functions, each with how often a run calls it and its launches."""
    us = sum(calls * sum(estimate(each, processor).us for each in launches) for calls, launches in functions)
    count = sum(calls * len(launches) for calls, launches in functions)
    return {"us": round(us, 1), "launches": count, "launch_us": round(count * processor.launch_us, 1)}


def _export(network: str, checkout: Path) -> dict[str, Any]:
    with scratch_folder("hybridc-against-") as folder:
        path = folder / "model.onnx"
        save_network(network, path)
        # -P: modules beside the script are not those of the checkout
        done = subprocess.run(
            [sys.executable, "-P", str(_EXPORT), str(path)],
            env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        remedy = "give a checkout of commit 51b395f"
        raise UsageError(
            "HC530", f"{checkout} exports no kernels:\n{done.stderr.strip()[-2000:]}", remedy=remedy
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def calls_of(exported: dict[str, Any], processor: Processor) -> list[tuple[int, list[Call]]]:
    """The launches of exported functions, compiled for a GPU."""
    kernels = kernels_of(compile_cubin(exported["source"], chip_of(processor).architecture))

    def launch(each: dict[str, Any]) -> Call:
        grid, block = ((int(x), int(y), int(z)) for x, y, z in (each["grid"], each["block"]))
        return call(kernels[each["name"]], grid, block, [Buffer(size) for size in each["buffers"]])

    return [(f["calls"], [launch(each) for each in f["launches"]]) for f in exported["functions"]]
