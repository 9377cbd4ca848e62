"""Whose the GPU is: CUDA does not let a process that was forked use what its parent has begun to use."""

from __future__ import annotations

import os

from hybridc.errors import UsageError

_users: list[int] = []
"""The process, if any, that uses the GPU: this one, or one that forked it."""


def claim_gpu() -> None:
    """Note that this process uses the GPU. Raises UsageError HC559 where a process that forked it does."""
    if _users and _users[0] != os.getpid():
        raise UsageError(
            "HC559",
            "this process was forked from one that uses the GPU, and cannot use it, too",
            remedy='start it otherwise: multiprocessing.get_context("spawn"); or load in the child alone',
        )
    _users[:] = [os.getpid()]
