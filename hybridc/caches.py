"""Where hybridc keeps files between processes."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_cache_path


def cache_path(name: str) -> Path:
    """A file or folder in the user's cache: on Linux in `$XDG_CACHE_HOME/hybridc` or `~/.cache/hybridc`."""
    return user_cache_path("hybridc", appauthor=False) / name
