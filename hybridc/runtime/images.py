"""What hears of an artifact's CUDA image before it is loaded.

The driver of a real GPU needs the image alone. An emulated one needs the CUDA source as well, and registers
here when it starts, so that the runtime need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[str, str], object]
"""Called with the key of an image and the CUDA source that it was compiled from."""

_listeners: dict[Listener, None] = {}  # ordered, each once


def add_listener(listener: Listener) -> None:
    """Call `listener` for every image from now on; adding it again does nothing."""
    _listeners[listener] = None


def announce(image_key: str, source: str) -> None:
    """Tell all listeners of an image that is about to be loaded. Raises what they raise."""
    for listener in _listeners:
        listener(image_key, source)
