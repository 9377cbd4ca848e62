"""Networks as torch exports them: `python -m tests.exports`."""
