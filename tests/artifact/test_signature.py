"""Signatures: what is trusted is loaded, and nothing else, before any of its code is."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridc
from hybridc.artifact.signature import PASSPHRASE_VARIABLE, SIGNATURE_BYTES, check_signature, sign_file
from hybridc.bundle.check import check_bundle
from hybridc.cli.main import main
from hybridc.errors import ArtifactError, HybridcError, UsageError
from hybridc.runtime import session
from tests.support.artifacts import SHAPE, cpu_model

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

PEM, SSH = serialization.Encoding.PEM, serialization.Encoding.OpenSSH
PKCS8, OPENSSH = serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.OpenSSH
PLAIN = serialization.NoEncryption()


def write_keys(
    folder: Path, name: str, seed: int, *, is_ssh: bool = False, passphrase: str | None = None
) -> tuple[Path, Path]:
    """Files of a private and a public key."""
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    encryption = PLAIN if passphrase is None else serialization.BestAvailableEncryption(passphrase.encode())
    private, public = folder / name, folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(PEM, OPENSSH if is_ssh else PKCS8, encryption))
    forms = (
        (SSH, serialization.PublicFormat.OpenSSH)
        if is_ssh
        else (PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    public.write_bytes(key.public_key().public_bytes(*forms))
    return private, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("keys")
    return lambda seed: write_keys(folder, f"key{seed}", seed)


@pytest.fixture(scope="module")
def unsigned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpu_model().write(tmp_path_factory.mktemp("unsigned") / "model.hyb")


@pytest.fixture
def artifact(unsigned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unsigned, tmp_path / "model.hyb"))


def code_of(action: Callable[[], Any]) -> str:
    with pytest.raises(HybridcError) as caught:
        action()
    return caught.value.code


def test_what_is_signed_loads_where_its_maker_is_trusted(artifact: Path, keys: Any) -> None:
    private, public = keys(1)
    assert main(["sign", str(artifact), "--key", str(private)]) == 0
    for trusted in (public, [str(public)], [keys(2)[1], public]):
        with hybridc.load(artifact, trusted_keys=trusted) as opened:
            opened.run(None, {"the/x": np.ones(SHAPE, np.float32)})


def test_nothing_of_what_is_not_trusted_is_executed(
    artifact: Path, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_code(artifact: object) -> None:
        raise AssertionError("native code is loaded")

    monkeypatch.setattr(session, "open_library", load_code)
    (private, public), (_, other) = keys(1), keys(2)
    assert code_of(lambda: hybridc.load(artifact, trusted_keys=public)) == "HC308"
    sign_file(artifact / "manifest.json", private)
    assert code_of(lambda: hybridc.load(artifact, trusted_keys=other)) == "HC309"
    with pytest.raises(AssertionError, match="native code"):
        hybridc.load(artifact, trusted_keys=public)


def test_hashes_that_fit_again_do_not_help(artifact: Path, keys: Any) -> None:
    private, public = keys(1)
    sign_file(artifact / "manifest.json", private)
    manifest = json.loads((artifact / "manifest.json").read_text())
    (artifact / "manifest.json").write_text(json.dumps(manifest))  # the same values in other bytes
    hybridc.load(artifact).close()
    assert code_of(lambda: hybridc.load(artifact, trusted_keys=public)) == "HC309"


@pytest.mark.parametrize("name", ["library.so", "weights.bin", "plan.json"])
def test_files_are_those_that_were_signed(artifact: Path, keys: Any, name: str) -> None:
    private, public = keys(1)
    sign_file(artifact / "manifest.json", private)
    content = bytearray((artifact / name).read_bytes())
    content[len(content) // 2] ^= 1
    (artifact / name).write_bytes(content)
    assert code_of(lambda: hybridc.load(artifact, trusted_keys=public)) == "HC304"


@pytest.mark.parametrize(
    "damage", [lambda s: s[:-1], lambda s: bytes(64), lambda s: s + b"\n", lambda s: b""]
)
def test_damaged_signature_is_refused(artifact: Path, keys: Any, damage: Callable[[bytes], bytes]) -> None:
    private, public = keys(1)
    path = sign_file(artifact / "manifest.json", private)
    path.write_bytes(damage(path.read_bytes()))
    assert code_of(lambda: hybridc.load(artifact, trusted_keys=public)) in ("HC304", "HC309")


@pytest.mark.parametrize("passphrase", [None, "open sesame"])
@pytest.mark.parametrize("is_ssh", [False, True])
def test_keys_in_both_formats(
    tmp_path: Path, is_ssh: bool, passphrase: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_ssh and passphrase is not None:
        pytest.importorskip("bcrypt")
    private, public = write_keys(tmp_path, "key", 3, is_ssh=is_ssh, passphrase=passphrase)
    file = tmp_path / "file"
    file.write_bytes(b"bytes")
    if passphrase is not None:
        assert code_of(lambda: sign_file(file, private)) == "HC584"
        monkeypatch.setenv(PASSPHRASE_VARIABLE, "wrong")
        assert code_of(lambda: sign_file(file, private)) == "HC584"
        monkeypatch.setenv(PASSPHRASE_VARIABLE, passphrase)
    signature = sign_file(file, private).read_bytes()
    assert len(signature) == SIGNATURE_BYTES
    check_signature(b"bytes", signature, [public], file)
    with pytest.raises(ArtifactError):
        check_signature(b"other", signature, [public], file)


def test_signature_of_rfc_8032(tmp_path: Path) -> None:
    """Its second test vector: one byte."""
    secret = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    key = ed25519.Ed25519PrivateKey.from_private_bytes(secret)
    (tmp_path / "key").write_bytes(key.private_bytes(PEM, PKCS8, PLAIN))
    (tmp_path / "file").write_bytes(b"\x72")
    assert sign_file(tmp_path / "file", tmp_path / "key").read_bytes().hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_openssl_checks_the_signature(tmp_path: Path, keys: Any) -> None:
    private, public = keys(1)
    (tmp_path / "file").write_bytes(b"bytes")
    signature = sign_file(tmp_path / "file", private)
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(public), "-rawin"]
    command += ["-in", str(tmp_path / "file"), "-sigfile", str(signature)]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_other_files_than_ed25519_keys_are_refused(tmp_path: Path, keys: Any) -> None:
    private, public = keys(1)
    curve = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "curve").write_bytes(curve.private_bytes(PEM, PKCS8, PLAIN))
    (tmp_path / "curve.pub").write_bytes(
        curve.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    (tmp_path / "text").write_text("no key")
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "text", tmp_path / "curve", public):
        assert code_of(partial(sign_file, tmp_path / "text", path)) == "HC584"
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "text", tmp_path / "curve.pub", private):
        assert code_of(partial(check_signature, b"", b"", [path], tmp_path)) == "HC584"
    with pytest.raises(UsageError, match="no trusted keys"):
        check_signature(b"", b"", [], tmp_path)


def test_commands(artifact: Path, keys: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (private, public), (_, other) = keys(1), keys(2)
    assert main(["verify", str(artifact)]) == 0
    assert "was not checked" in capsys.readouterr().out
    run = ["run", str(artifact), "--random", "--trust"]
    assert main([*run, str(public)]) == ArtifactError.exit_code
    assert "HC308" in capsys.readouterr().err
    assert main(["sign", str(artifact), "--key", str(private)]) == 0
    assert main(["verify", str(artifact), "--trust", str(other)]) == ArtifactError.exit_code
    assert "HC309" in capsys.readouterr().err
    assert main(["verify", str(artifact), "--trust", str(other), "--trust", str(public)]) == 0
    assert main([*run, str(public)]) == 0
    group = ["group", str(artifact), "--gpu-memory", "1MiB", "--trust"]
    assert main([*group, str(public)]) == 0
    assert main([*group, str(other)]) == ArtifactError.exit_code
    with hybridc.load_group([artifact], gpu_memory="1MiB", trusted_keys=public) as members:
        assert list(members) == [artifact.stem]
    assert code_of(lambda: hybridc.load_group([artifact], gpu_memory="1MiB", trusted_keys=other)) == "HC309"


def test_bundles_are_signed_as_a_whole(tmp_path: Path, keys: Any) -> None:
    """Of a bundle the list of hashes is what counts; the files here are any."""
    (private, public), (_, other) = keys(1), keys(2)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "library").write_bytes(b"code")
    listing = subprocess.run(["sha256sum", "lib/library"], cwd=tmp_path, capture_output=True, check=True)
    (tmp_path / "SHA256SUMS").write_bytes(listing.stdout)
    assert code_of(lambda: check_bundle(tmp_path, [public])) == "HC308"
    assert main(["sign", str(tmp_path), "--key", str(private)]) == 0
    assert main(["verify", str(tmp_path), "--trust", str(public)]) == 0
    assert code_of(lambda: check_bundle(tmp_path, [other])) == "HC309"
    (tmp_path / "lib" / "libc.so.6").write_bytes(b"of somebody else")
    assert code_of(lambda: check_bundle(tmp_path, [public])) == "HC305"
    (tmp_path / "lib" / "libc.so.6").unlink()
    (tmp_path / "lib" / "library").write_bytes(b"c0de")
    assert code_of(lambda: check_bundle(tmp_path, [public])) == "HC304"
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  ../elsewhere\n")
    assert code_of(lambda: check_bundle(tmp_path)) == "HC303"
