"""Whatever may be fed: values, indices and divisors out of bounds, arrays of any type, shape and layout.

A feed that is wrong is refused by its own code; any other gives what onnxruntime gives for it.

python -m tests.fuzz.feeds --minutes 20 --seed 1
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import hybridc
from hybridc import emulator
from hybridc.errors import HybridcError
from tests.fuzz.driver import Harness, Outcome, Verdict, main, refused
from tests.support.machines import EAGER_GPU
from tests.support.random_graphs import random_graph

GPU_BYTES = 64 << 20
GPU_SHARE = 0.25
"""Of the inputs: the emulated GPU is slow, and its code takes several times as long to compile."""
NETWORKS = 16
"""Random graphs that a process compiles, one after the other as it draws them."""
NETWORK_SHARE = 0.3
SESSIONS = 24
"""That are open at once."""
TOLERANCE = 1e-3
"""Of the largest finite number of a result, as values of all sizes are added up."""
SMALLEST_SCALE = 1e-30
"""Where all results are smaller, whether denormals are flushed is up to the processor."""

Feeds = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """What an operator takes of an integer input: `lower` to `upper`, or anything but 0 if it divides."""

    lower: int = 0
    upper: int = 0
    is_divisor: bool = False

    def are_kept(self, array: np.ndarray) -> bool:
        if self.is_divisor:
            return bool((array != 0).all())
        return bool(((array >= self.lower) & (array <= self.upper)).all())


def from_end(*extents: int) -> tuple[Limits, ...]:
    """Indices into axes, which may count from their ends; of several axes in the last axis."""
    return tuple(Limits(-extent, extent - 1) for extent in extents)


@dataclass(frozen=True)
class Case:
    """One operator, its inputs and what it takes of them."""

    operator: str
    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, tuple[Limits, ...]] = field(default_factory=dict)
    operands: tuple[str, ...] = ()
    results: int = 1
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> onnx.ModelProto:
        results = [f"y{i}" for i in range(self.results)]
        operands = self.operands or (*self.inputs, *self.constants)
        node = helper.make_node(self.operator, operands, results, "the_node", **self.attributes)
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
            for name, (dtype, shape) in self.inputs.items()
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in results]
        weights = [numpy_helper.from_array(np.asarray(a), name) for name, a in self.constants.items()]
        graph = helper.make_graph([node], "operator", inputs, outputs, weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)

    def allows(self, feeds: Mapping[str, np.ndarray]) -> bool:
        """Whether all values are legal."""
        return all(
            limit.are_kept(array)
            for name, limits in self.limits.items()
            for limit, array in zip(limits, split(feeds[name], len(limits)), strict=True)
        )


def split(array: np.ndarray, count: int) -> list[np.ndarray]:
    """One array; or the parts of its last axis, as long as `count`."""
    return [array] if count == 1 else [array[..., i] for i in range(count)]


X = ("float32", (3, 4))
DIVISOR = {"b": (Limits(is_divisor=True),)}
INDEXING = {
    "gather": Case("Gather", {"x": X, "i": ("int64", (2, 2))}, limits={"i": from_end(3)}),
    "gather columns": Case(
        "Gather", {"x": X, "i": ("int32", (3,))}, limits={"i": from_end(4)}, attributes={"axis": 1}
    ),
    "gather one": Case("Gather", {"x": X, "i": ("int64", ())}, limits={"i": from_end(3)}),
    "gather elements": Case(
        "GatherElements", {"x": X, "i": ("int64", (3, 2))},
        limits={"i": from_end(4)}, attributes={"axis": 1},
    ),
    "gather nd": Case("GatherND", {"x": X, "i": ("int64", (5, 2))}, limits={"i": from_end(3, 4)}),
    "gather rows nd": Case(
        "GatherND", {"x": ("float32", (2, 3, 4)), "i": ("int64", (2, 2, 1))},
        limits={"i": from_end(3)}, attributes={"batch_dims": 1},
    ),
    "one hot": Case(
        "OneHot", {"i": ("int64", (2, 3))}, {"depth": np.int64(4), "values": np.array([0, 1], "float32")}
    ),
    "max unpool": Case(
        "MaxUnpool", {"x": ("float32", (1, 2, 2, 2)), "i": ("int64", (1, 2, 2, 2))},
        limits={"i": (Limits(0, 31),)}, attributes={"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
    "roi align": Case(
        "RoiAlign", {"x": ("float32", (2, 2, 6, 6)), "r": ("float32", (3, 4)), "i": ("int64", (3,))},
        limits={"i": (Limits(0, 1),)}, attributes={"output_height": 2, "output_width": 2},
    ),
}  # fmt: skip
ARITHMETIC = {
    "top k": Case("TopK", {"x": ("float32", (2, 7))}, {"k": np.array([3])}, results=2),
    "arg max": Case("ArgMax", {"x": X}, attributes={"axis": 1}),
    "cumsum": Case("CumSum", {"x": X}, {"axis": np.int64(1)}),
    "softmax": Case("Softmax", {"x": X}),
    "max": Case("Max", {"a": X, "b": X}),
    "clip": Case("Clip", {"x": X}, {"low": np.float32(-1), "high": np.float32(1)}),
    "reduce max": Case("ReduceMax", {"x": X}, {"axes": np.array([1])}),
    "divide": Case("Div", {"a": X, "b": X}),
    "power": Case("Pow", {"a": X, "b": X}),
    "cast": Case("Cast", {"x": X}, attributes={"to": TensorProto.FLOAT16}),
    "choose": Case("Where", {"c": ("bool", (3, 4)), "a": X, "b": X}),
    "half": Case("Add", {"a": ("float16", (5,)), "b": ("float16", (1,))}),
    "scalar": Case("Mul", {"a": ("float32", ()), "b": ("float32", ())}),
    "fmod": Case("Mod", {"a": ("int32", (6,)), "b": ("int32", (6,))}, limits=DIVISOR, attributes={"fmod": 1}),
}


def _scatters(reduction: str) -> dict[str, Case]:
    how = {} if reduction == "none" else {"reduction": reduction}
    return {
        f"scatter nd {reduction}": Case(
            "ScatterND", {"x": X, "i": ("int64", (2, 1)), "u": ("float32", (2, 4))},
            limits={"i": from_end(3)}, attributes=how,
        ),
        f"scatter elements {reduction}": Case(
            "ScatterElements", {"x": X, "i": ("int64", (2, 3)), "u": ("float32", (2, 3))},
            limits={"i": from_end(4)}, attributes={"axis": 1, **how},
        ),
    }  # fmt: skip


def _quotients(dtype: str) -> dict[str, Case]:
    inputs = {"a": (dtype, (6,)), "b": (dtype, (6,))}
    return {f"{name.lower()} {dtype}": Case(name, inputs, limits=DIVISOR) for name in ("Div", "Mod")}


OPERATORS = {
    **INDEXING,
    **ARITHMETIC,
    **{name: c for reduction in ("none", "add", "max") for name, c in _scatters(reduction).items()},
    **{name: c for dtype in ("int32", "int64") for name, c in _quotients(dtype).items()},
}


# ---------------------------------------------------------------------------------------- compiled


@dataclass(frozen=True)
class Opened:
    """A model that is loaded, by hybridc and by onnxruntime."""

    session: hybridc.runtime.Session
    reference: Any
    case: Case | None
    kinds: tuple[str, ...]
    """Special values that it may be fed."""


@lru_cache(maxsize=1)
def _opened() -> OrderedDict[tuple[str, str], Opened]:
    """Of this process, by name and device; the one used last is the last."""
    return OrderedDict()


def _on_device(name: str, device: str) -> Opened:
    """An operator by its name, or a random graph by its number."""
    opened, key = _opened(), (name, device)
    if key not in opened:
        if len(opened) == SESSIONS:
            opened.popitem(last=False)[1].session.close()
        try:
            opened[key] = _open(name, device)
        except HybridcError as error:
            raise RuntimeError(f"the harness cannot load {name}") from error
    opened.move_to_end(key)
    return opened[key]


def _open(name: str, device: str) -> Opened:
    case = OPERATORS.get(name)
    model = case.model() if case is not None else network(int(name))
    if device == "gpu" and not emulator.is_active():
        emulator.start(GPU_BYTES, guard_tensors=True)
    with tempfile.TemporaryDirectory(prefix="hybridc-fuzz-") as folder:
        path, target = Path(folder) / "model.hyb", "cuda:sm_75+avx2" if device == "gpu" else "avx2"
        options: Any = {"target": target, "machine": EAGER_GPU, "plan_seconds": 1, "fast_algorithms": False}
        hybridc.compile(model, path, **options)
        reference, kinds = _reference(model), _kinds(model, case)
        return Opened(hybridc.load(path, threads=1), reference, case, kinds)


def _kinds(model: onnx.ModelProto, case: Case | None) -> tuple[str, ...]:
    """Which special values to feed: only such as have one right result.

    ONNX does not say which index a maximum among NaN has, nor what the maximum is: onnxruntime's depends on
    where they stand, and its MaxPool makes the least finite number of NaN and minus infinity. Where a sum of
    huge numbers leaves float32 depends on its order. In a network infinities may turn into NaN on their way.
    """
    operators = {node.op_type for node in model.graph.node}
    excluded: set[str] = set() if case is not None else {"huge", "all"}
    if operators & {"ArgMax", "ArgMin"}:
        excluded |= {"nan", "all"}
    if operators & {"ReduceMax", "ReduceMin"}:
        excluded |= {"nan", "all"} if case is not None else {"nan", "infinite", "all"}
    if "RoiAlign" in operators:  # zero weights of infinities are NaN, where a sample has any
        excluded |= {"infinite", "huge", "all"}
    if "MaxPool" in operators:
        excluded |= {"nan", "infinite", "huge", "all"}
    return tuple(kind for kind in KINDS if kind not in excluded)


def network(number: int) -> onnx.ModelProto:
    """A random graph without a jump where rounding decides on which side a number is."""
    random = Random(number)
    while True:
        model = random_graph(random.randint)
        if not any(node.op_type == "Floor" for node in model.graph.node):
            return model


def _reference(model: onnx.ModelProto) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


# ------------------------------------------------------------------------------------------ values


KINDS = ("plain", "nan", "infinite", "denormal", "huge", "ties", "all")
"""What stands between plain floating point numbers."""


def drawn(
    random: Random,
    dtype: str,
    shape: tuple[int, ...],
    limits: tuple[Limits, ...],
    kinds: tuple[str, ...] = KINDS,
) -> np.ndarray:
    """An array of legal or illegal values."""
    generator = np.random.default_rng(random.getrandbits(32))
    if dtype == "bool":
        return np.asarray(generator.random(shape) < 0.5)
    if "int" in dtype:
        return _integers(random, generator, dtype, shape, limits)
    values = np.asarray(generator.standard_normal(shape))
    chosen = _special(random.choice(kinds), dtype)
    where = generator.random(shape) < random.choice((0.1, 0.5, 1.0))
    if chosen and values.size:
        values = np.where(where, generator.choice(chosen, shape), values)
    return values.astype(dtype)


def _special(kind: str, dtype: str) -> tuple[float, ...]:
    largest = float(np.finfo(dtype).max)
    special: dict[str, tuple[float, ...]] = {
        "plain": (),
        "nan": (np.nan,),
        "infinite": (np.inf, -np.inf),
        "denormal": (float(np.finfo(dtype).smallest_subnormal), -1e-39, -0.0),
        "huge": (largest, -largest, largest / 3),
        "ties": (1.0, 1.0, 0.0, -0.0, 0.5),
        "all": (np.nan, np.inf, -np.inf, largest, 0.0),
    }
    return special[kind]


def _integers(
    random: Random,
    generator: np.random.Generator,
    dtype: str,
    shape: tuple[int, ...],
    limits: tuple[Limits, ...],
) -> np.ndarray:
    """In their bounds, or one to all of them outside of them, just or far."""
    info = np.iinfo(dtype)
    values = generator.integers(-9, 10, shape, dtype)
    parts = [np.asarray(part) for part in split(np.asarray(values), max(len(limits), 1))]
    for part, limit in zip(parts, limits, strict=False):
        low, high = (1, 9) if limit.is_divisor else (limit.lower, limit.upper)
        part[...] = generator.integers(low, high + 1, part.shape, dtype)
    if values.size and random.random() < 0.5:
        far = (0, info.min, info.max, 10**6, -(10**6), -1)
        near = [v for limit in limits for v in (limit.lower - 1, limit.upper + 1)]
        for _ in range(random.choice((1, 1, 3))):
            values.reshape(-1)[random.randrange(values.size)] = random.choice((*far, *near))
    return values


def _strided(array: np.ndarray) -> np.ndarray:
    wide = np.zeros([2 * extent for extent in array.shape], array.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in array.shape)]
    view[...] = array
    return view


def _reversed(array: np.ndarray) -> np.ndarray:
    flip = tuple(slice(None, None, -1) for _ in array.shape)
    return array[flip].copy()[flip]


def _read_only(array: np.ndarray) -> np.ndarray:
    copied = array.copy()
    copied.flags.writeable = False
    return copied


def _unaligned(array: np.ndarray) -> np.ndarray:
    data = np.zeros(array.nbytes + 1, np.uint8)
    data[1:] = np.frombuffer(array.tobytes(), np.uint8)
    return data[1:].view(array.dtype).reshape(array.shape)


def _repeated(array: np.ndarray) -> np.ndarray:
    """One element that stands everywhere: strides of zero."""
    return np.broadcast_to(array.reshape(-1)[:1].reshape(()), array.shape) if array.size else array


LAYOUTS: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
    _strided,
    _reversed,
    _read_only,
    _unaligned,
    _repeated,
    np.asfortranarray,
    lambda array: array.astype(array.dtype.newbyteorder()),
    np.ma.masked_array,
)
"""Of the same values, but for `_repeated`."""

WRONG: tuple[Callable[[np.ndarray], Any], ...] = (
    lambda array: array.astype(object),
    lambda array: array.astype(np.complex64),
    lambda array: array.astype(np.float64 if array.dtype != np.float64 else np.float32),
    lambda array: array.astype("S8"),
    lambda array: np.zeros(array.shape, "datetime64[s]"),
    lambda array: np.zeros(array.shape, [("a", array.dtype)]),
    lambda array: array[..., None],
    lambda array: array[None],
    lambda array: np.concatenate([array.reshape(-1), np.ones(1, array.dtype)]),
    lambda array: [[1.0], [1.0, 2.0]],
    lambda array: None,
    lambda array: "text",
    lambda array: {"x": array},
    lambda array: {1, 2},
    lambda array: object(),
    lambda array: _nested(100),
    lambda array: 1 << 70,
)
"""No array of that type and shape."""


def _nested(depth: int) -> Any:
    value: Any = 1.0
    for _ in range(depth):
        value = [value]
    return value


def _as_mapping(random: Random, feeds: Feeds) -> Any:
    makers: tuple[Callable[[Feeds], Any], ...] = (
        dict,
        dict,
        OrderedDict,
        UserDict,
        MappingProxyType,
        lambda given: defaultdict(lambda: np.zeros(1), given),
    )
    return random.choice(makers)(feeds)


def _misnamed(random: Random, feeds: dict[Any, Any]) -> Any:
    """Feeds with a name too many, too few, or none at all."""
    name = next(iter(feeds))
    without = {key: value for key, value in feeds.items() if key != name}
    return random.choice(
        (
            without,
            {**feeds, "unknown": np.zeros(1)},
            {**feeds, 7: np.zeros(1)},
            {**feeds, None: np.zeros(1)},
            {**feeds, ("x", 0): np.zeros(1)},
            {**without, name.upper(): feeds[name]},
            list(feeds.values()),
            None,
            set(feeds),
            "text",
        )
    )


MISNAMED_OUTPUTS: tuple[Any, ...] = ("y0", ["unknown"], [7], [None], [["y0"]], 7, b"y0", [{}], {"a": 1})


# ---------------------------------------------------------------------------------------- verdicts


def check(random: Random, folder: Path, names: tuple[str, ...] = (), gpu_share: float = GPU_SHARE) -> Verdict:
    """One run of an operator, or of a random graph."""
    device = "gpu" if random.random() < gpu_share else "cpu"
    name = random.choice(names or tuple(OPERATORS))
    if not names and random.random() < NETWORK_SHARE:
        name = str(random.randrange(NETWORKS))
    opened = _on_device(name, device)
    ports = {p.name: p for p in opened.session.artifact.manifest.inputs}
    limits = {} if opened.case is None else opened.case.limits
    feeds = {n: drawn(random, p.dtype, p.shape, limits.get(n, ()), opened.kinds) for n, p in ports.items()}
    kind = random.random()
    if kind < 0.1:
        return _refusal(opened, None, _misnamed(random, feeds), ("HC551", "HC552"))
    if kind < 0.15:
        return _refusal(opened, random.choice(MISNAMED_OUTPUTS), feeds, ("HC555",))
    wrong_name = random.choice(list(feeds))
    if kind < 0.35:
        wrong = random.choice(WRONG)(feeds[wrong_name])
        return _refusal(opened, None, {**feeds, wrong_name: wrong}, ("HC553", "HC554"))
    if kind < 0.6 and feeds[wrong_name].ndim:
        feeds[wrong_name] = random.choice(LAYOUTS)(feeds[wrong_name])
    if opened.case is not None and not opened.case.allows(feeds):
        verdict = _refusal(opened, None, feeds, ("HC560",))
        again = {n: np.zeros_like(a) for n, a in feeds.items()}  # the next run is as if nothing had been
        again |= {n: np.ones_like(a) for n, a in again.items() if a.dtype.kind == "i"}
        return (
            verdict if verdict.outcome is not Outcome.REFUSED else _compared(opened, again, device, verdict)
        )
    return _compared(opened, _as_mapping(random, feeds), device, Verdict(Outcome.RIGHT))


def _refusal(opened: Opened, names: Any, feeds: Any, codes: tuple[str, ...]) -> Verdict:
    try:
        opened.session.run(names, feeds)
    except HybridcError as error:
        if error.code in codes:
            return refused(error)
        return Verdict(Outcome.WRONG, f"{_told(opened, feeds)}: {error.code} instead of {codes}: {error}")
    return Verdict(Outcome.WRONG, f"{_told(opened, feeds)}: not refused by {codes}")


def _compared(opened: Opened, feeds: Mapping[str, Any], device: str, verdict: Verdict) -> Verdict:
    """The verdict, if the results are those of onnxruntime."""
    try:
        results = opened.session.run(None, feeds)
    except HybridcError as error:
        return Verdict(Outcome.WRONG, f"{_told(opened, feeds)}: {error.code}: {error}")
    if _overflows(opened, feeds):
        return verdict
    plain = {n: np.array(a, dtype=np.asarray(a).dtype.newbyteorder("=")) for n, a in feeds.items()}
    try:
        expected = opened.reference.run(None, plain)
    except Exception:  # of several kinds, which share no base
        return Verdict(Outcome.REFUSED, "onnxruntime")
    for result, reference in zip(results, expected, strict=True):
        if told := difference(result, np.asarray(reference), device):
            return Verdict(Outcome.WRONG, f"{_told(opened, feeds)}, {device}: {told}")
    return verdict


def _overflows(opened: Opened, feeds: Mapping[str, Any]) -> bool:
    """The least integer divided by -1 has no result: onnxruntime dies of it."""
    if opened.case is None or opened.case.operator not in ("Div", "Mod") or feeds["a"].dtype.kind != "i":
        return False
    return bool(((feeds["a"] == np.iinfo(feeds["a"].dtype).min) & (feeds["b"] == -1)).any())


def difference(result: np.ndarray, reference: np.ndarray, device: str) -> str:
    """What is different, or nothing. Where a sum leaves float32 depends on its order, and what a GPU's
    maximum makes of NaN is its own affair (docs/limits.md)."""
    if result.shape != reference.shape or result.dtype != reference.dtype:
        return f"{result.dtype}{result.shape} instead of {reference.dtype}{reference.shape}"
    wide, exact = result.astype(np.float64), reference.astype(np.float64)
    if result.dtype.kind in "iub":
        differs = result != reference
    else:
        scale = np.abs(exact[np.isfinite(exact)]).max(initial=SMALLEST_SCALE)
        differs = ~np.isclose(wide, exact, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
        differs &= ~np.isnan(exact) | (device != "gpu")
    if not differs.any():
        return ""
    first = tuple(int(i) for i in np.argwhere(differs)[0])
    return f"{differs.sum()} of {differs.size} differ, at {first} {wide[first]} instead of {exact[first]}"


def _told(opened: Opened, feeds: Any) -> str:
    name = "network" if opened.case is None else opened.case.operator
    told = (
        {n: a.tolist() if isinstance(a, np.ndarray) else a for n, a in feeds.items()}
        if isinstance(feeds, Mapping)
        else feeds
    )
    return f"{name} {str(told)[:2000]}"


HARNESS = Harness("feeds", check, seconds=120)

if __name__ == "__main__":
    raise SystemExit(main(HARNESS))
