"""The command line: one file per command, and `main`, which turns every error into text and an exit code."""

from hybridc.cli.main import main

__all__ = ["main"]
