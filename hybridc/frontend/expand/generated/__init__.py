"""Operators that make numbers of nothing, or of what the model says."""
