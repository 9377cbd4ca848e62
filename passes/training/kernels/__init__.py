"""Tensor expressions of what only training computes; block attributes tell schedule rules what they are."""
