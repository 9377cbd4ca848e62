"""Vectorised elementary functions."""

from __future__ import annotations


def install() -> None:
    """Register them for LLVM code generation; calling it again does nothing."""
