"""Architectures by family."""
