"""CUDA functions compiled for the emulated GPU."""

from __future__ import annotations

import hashlib

from hybridc import emulator


def compile_for_emulator(source: str) -> bytes:
    image = hashlib.sha256(source.encode()).hexdigest().encode()
    emulator.provide_kernels(emulator.image_key(image), source)
    return image
