"""Examples to train with: arrays in an .npz file, or CIFAR-10 in its binary format."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridc.artifact.manifest import Port
from hybridc.errors import UsageError
from hybridc.labels import check_labels

CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32


@dataclass(frozen=True, slots=True)
class Dataset:
    """Arrays with one example a row: all have as many."""

    inputs: Mapping[str, np.ndarray]
    targets: Mapping[str, np.ndarray]

    @property
    def size(self) -> int:
        return len(next(iter((*self.inputs.values(), *self.targets.values()))))

    def batch(self, rows: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Inputs and targets of some examples."""
        inputs = {name: array[rows] for name, array in self.inputs.items()}
        return inputs, {name: array[rows] for name, array in self.targets.items()}

    def digest(self) -> str:
        """The same for the same names, types and values alone: a BLAKE2 hash, at about 1 GB a second."""
        found = hashlib.blake2b(digest_size=16)
        for arrays in (self.inputs, self.targets):
            for name, array in sorted(arrays.items()):
                found.update(repr((name, array.dtype.name, array.shape)).encode())
                found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return found.hexdigest()


def load_dataset(path: str | Path, inputs: Sequence[Port], targets: Sequence[Port]) -> Dataset:
    """Read examples for these inputs and targets.

    An .npz file has an array for each by name; `x` and `y` will do where there is one input and one target.
    A file or folder with names ending in .bin is CIFAR-10: images become float32 from 0 to 1.
    Raises UsageError HC571 if the file cannot be read, HC572 if its arrays do not fit, HC581 for a label that
    the loss has no class for.
    """
    path = Path(path)
    if path.is_dir() or path.suffix == ".bin":
        images, labels = read_cifar10(path)
        arrays = {"x": images.astype(np.float32) / 255.0, "y": labels}
    else:
        arrays = _read_npz(path)
    dataset = Dataset(_chosen(arrays, inputs, "x", path), _chosen(arrays, targets, "y", path))
    sizes = {len(array) for array in (*dataset.inputs.values(), *dataset.targets.values())}
    if len(sizes) != 1 or not min(sizes):
        what = f"its arrays have {', '.join(map(str, sorted(sizes)))} rows"
        raise UsageError("HC572", what, where=str(path), remedy="give every array one row per example")
    return dataset


def read_cifar10(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 [n, 3, 32, 32], and labels, int64 [n], of CIFAR-10's binary version.

    A record is a byte of the label and 1024 bytes each of red, green and blue, row by row. Of a folder all
    `data_batch_*.bin` are read in order, without the test batch. Raises UsageError HC571.
    (Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.)
    """
    files = sorted(path.glob("data_batch_*.bin")) if path.is_dir() else [path]
    if not files:
        what = "the folder has no data_batch_*.bin"
        raise UsageError("HC571", what, where=str(path), remedy="give the binary version of CIFAR-10")
    records = np.concatenate([_cifar_records(file) for file in files])
    return records[:, 1:].reshape(-1, *CIFAR_SHAPE), records[:, 0].astype(np.int64)


def _cifar_records(file: Path) -> np.ndarray:
    data = np.frombuffer(_read(file), np.uint8)
    if not data.size or data.size % _CIFAR_RECORD_BYTES or data[::_CIFAR_RECORD_BYTES].max() > 9:
        what = (
            f"not CIFAR-10's binary format: {data.size:,} bytes are not a multiple of {_CIFAR_RECORD_BYTES:,}"
        )
        raise UsageError("HC571", what, where=str(file), remedy="use the binary version of CIFAR-10")
    return data.reshape(-1, _CIFAR_RECORD_BYTES)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        what = f"cannot read the examples: {error.strerror}"
        raise UsageError("HC571", what, where=str(file), remedy="check the path") from None


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, TypeError, MemoryError, zipfile.BadZipFile) as error:
        what = f"cannot read the examples: {getattr(error, 'strerror', None) or error}"
        raise UsageError("HC571", what, where=str(path), remedy="write them with numpy.savez") from None


def _chosen(
    arrays: Mapping[str, np.ndarray], ports: Sequence[Port], short: str, path: Path
) -> dict[str, np.ndarray]:
    chosen = {}
    for port in ports:
        array = arrays.get(port.name, arrays.get(short) if len(ports) == 1 else None)
        if array is None:
            what = f"there is no array {port.name!r}; there are {', '.join(map(repr, arrays)) or 'none'}"
            remedy = f"name its arrays as the model does: {', '.join(repr(p.name) for p in ports)}"
            raise UsageError("HC572", what, where=str(path), remedy=remedy)
        chosen[port.name] = _fitting(array, port, path)
    return chosen


def _fitting(array: np.ndarray, port: Port, path: Path) -> np.ndarray:
    """The array in the port's type, if no value of its kind can be lost but by rounding."""
    kinds = {"f": "fiub", "i": "iub", "u": "ub", "b": "b"}.get(np.dtype(port.dtype).kind, "")
    if array.dtype.kind not in kinds or array.shape[1:] != port.shape[1:] or array.ndim != len(port.shape):
        what = f"array {port.name!r} is {array.dtype}{list(array.shape)}"
        remedy = f"give {port.dtype}[n, {', '.join(map(str, port.shape[1:]))}]".replace(", ]", "]")
        raise UsageError("HC572", what, where=str(path), remedy=remedy)
    fitting = np.ascontiguousarray(array, port.dtype)
    check_labels(port.name, fitting, port.labels, str(path))
    return fitting
