"""Whether a bundle is what was written, and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from hybridc.artifact.signature import SIGNATURE_BYTES, SUFFIX, check_signature
from hybridc.bundle.write import HASHES, LIBRARIES
from hybridc.errors import ArtifactError
from hybridc.files import OpenFile, read_file

_LARGEST_HASHES_BYTES = 1 << 20
_AGAIN = "copy the bundle again"


def is_bundle(path: Path) -> bool:
    """Whether a folder may be one."""
    return (path / HASHES).is_file()


def check_bundle(folder: Path, trusted_keys: Sequence[str | Path] | None = None) -> None:
    """Read every file that a bundle lists and compare its hash; executes nothing.

    Its folder of libraries must have no others: the dynamic linker would take them before those of the
    system. With `trusted_keys`, files with ed25519 public keys, an owner of one of them must have signed it.

    Raises ArtifactError HC303 where the list of hashes is malformed, HC304 where a file is missing or
    differs, HC305 for a library that is not listed, HC308 if it is not signed, HC309 if nobody who is trusted
    signed it; UsageError HC583 or HC584 for the keys.
    """
    content = _read(folder / HASHES, _LARGEST_HASHES_BYTES)
    if trusted_keys is not None:
        path = folder / (HASHES + SUFFIX)
        signature = _read(path, SIGNATURE_BYTES) if path.exists() else None
        check_signature(content, signature, trusted_keys, folder)
    listed = _listed(folder / HASHES, content)
    known = {folder / name for name, _ in listed}
    for path in sorted((folder / LIBRARIES).rglob("*")):
        if path not in known and not (path.is_dir() and not path.is_symlink()):
            what = "the bundle does not list it, but its runner might load it"
            raise ArtifactError("HC305", what, where=str(path), remedy="remove it, or copy the bundle again")
    for name, sha256 in listed:
        try:
            file = OpenFile(folder / name)
            found = file.sha256()
            file.close()
        except OSError as error:
            raise _unreadable(folder / name, error) from None
        if found != sha256:
            what = "its content has changed (the SHA-256 hash differs)"
            raise ArtifactError("HC304", what, where=str(folder / name), remedy=_AGAIN)


def _listed(where: Path, content: bytes) -> list[tuple[str, str]]:
    """Names and hashes, as sha256sum writes them."""
    lines = [line.split("  ", 1) for line in content.decode(errors="replace").splitlines()]
    for line in lines:
        name = PurePosixPath(line[-1])
        if len(line) != 2 or len(line[0]) != 64 or name.is_absolute() or ".." in name.parts:
            raise ArtifactError("HC303", "malformed: not a list of hashes", where=str(where), remedy=_AGAIN)
    return [(name, sha256) for sha256, name in lines]


def _read(path: Path, most_bytes: int) -> bytes:
    try:
        return read_file(path, most_bytes)
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ArtifactError:
    return ArtifactError("HC304", f"cannot be read: {error.strerror}", where=str(path), remedy=_AGAIN)
