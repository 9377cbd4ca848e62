"""Who made an artifact: an ed25519 signature (RFC 8032) over the bytes that have the hashes of all its files.

The signature of `manifest.json` is the 64 bytes of `manifest.json.sig` beside it; of a bundle that of
`SHA256SUMS` likewise. Any other tool that knows ed25519 can make and check them. Keys are read, and all
arithmetic is done, by the package `cryptography`, the extra `sign`, which is imported when it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridc.errors import ArtifactError, UsageError
from hybridc.files import read_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SUFFIX = ".sig"
"""Behind the name of the file that is signed."""
SIGNATURE_BYTES = 64
PASSPHRASE_VARIABLE = "HYBRIDC_KEY_PASSPHRASE"
"""Environment variable with that of an encrypted private key."""
_LARGEST_KEY_BYTES = 1 << 16
_KeyPath = str | Path


def sign_file(path: Path, key: _KeyPath) -> Path:
    """Write the signature of a file beside it, in one step, and return its path.

    `key` is a file with an ed25519 private key, in PEM (PKCS #8) or OpenSSH's format. Raises UsageError HC562
    if the signature cannot be written, HC583 without `cryptography`, HC584 for the key; OSError for `path`.
    """
    signature = _private_key(Path(key)).sign(read_file(path, 1 << 30))
    target = path.with_name(path.name + SUFFIX)
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_bytes(signature)
        os.replace(partial, target)
    except OSError as error:
        what = f"the signature cannot be written: {error.strerror}"
        raise UsageError("HC562", what, where=str(target), remedy="choose another location") from None
    return target


def check_signature(content: bytes, signature: bytes | None, keys: Sequence[_KeyPath], where: Path) -> None:
    """Refuse bytes that no owner of one of `keys` has signed.

    `keys` are files with an ed25519 public key each, in PEM or OpenSSH's format. Raises ArtifactError HC308
    if `signature` is None, HC309 if it is that of other bytes or by none of the keys; UsageError HC583
    without `cryptography`, HC584 for a key, or for none at all.
    """
    if not keys:
        raise UsageError(
            "HC584", "there are no trusted keys", remedy="name a file with an ed25519 public key"
        )
    trusted = [_public_key(Path(key)) for key in keys]
    if signature is None:
        remedy = "let its maker sign it with `hybridc sign`, or load it without trusted keys"
        raise ArtifactError("HC308", "it is not signed", where=str(where), remedy=remedy)
    if not any(_is_by(key, signature, content) for key in trusted):
        what = "its signature is by none of the trusted keys, or it was changed after it was signed"
        remedy = "get it from its maker again, and do not load it until its signature is right"
        raise ArtifactError("HC309", what, where=str(where), remedy=remedy)


def _is_by(key: Ed25519PublicKey, signature: bytes, content: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True


def _private_key(path: Path) -> Ed25519PrivateKey:
    content, passphrase = _read(path), os.environ.get(PASSPHRASE_VARIABLE)
    serialization, ed25519 = _package()
    is_ssh = b"-----BEGIN OPENSSH PRIVATE KEY-----" in content
    read = serialization.load_ssh_private_key if is_ssh else serialization.load_pem_private_key
    try:
        key = read(content, None if passphrase is None else passphrase.encode())
    except TypeError:  # what cryptography says where a passphrase is missing, or given for nothing
        if passphrase is not None:
            what, remedy = "the key is not encrypted", f"unset {PASSPHRASE_VARIABLE}"
        else:
            what, remedy = "the key is encrypted", f"give its passphrase as {PASSPHRASE_VARIABLE}"
        raise UsageError("HC584", what, where=str(path), remedy=remedy) from None
    except Exception as error:
        raise _no_key(path, "private", error) from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise _no_key(path, "private")
    return key


def _public_key(path: Path) -> Ed25519PublicKey:
    content = _read(path)
    serialization, ed25519 = _package()
    is_pem = content.lstrip().startswith(b"-----BEGIN")
    read = serialization.load_pem_public_key if is_pem else serialization.load_ssh_public_key
    try:
        key = read(content)
    except Exception as error:
        raise _no_key(path, "public", error) from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise _no_key(path, "public")
    return key


def _read(path: Path) -> bytes:
    try:
        return read_file(path, _LARGEST_KEY_BYTES)
    except OSError as error:
        what = f"the key cannot be read: {error.strerror}"
        raise UsageError("HC584", what, where=str(path), remedy="name a file with an ed25519 key") from None


def _package() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        what = f"signatures need the package cryptography: {error}"
        raise UsageError("HC583", what, remedy="pip install 'hybridc[sign]'") from None
    return serialization, ed25519


def _no_key(path: Path, kind: str, error: Exception | None = None) -> UsageError:
    reason = "" if error is None else f": {str(error).partition(chr(10))[0] or type(error).__name__}"
    what = f"the file has no ed25519 {kind} key that can be read{reason}"
    make = "openssl genpkey -algorithm ed25519 -out key.pem"
    public = "openssl pkey -in key.pem -pubout -out public.pem"
    remedy = f"make one with: {make if kind == 'private' else public}"
    return UsageError("HC584", what, where=str(path), remedy=remedy)
