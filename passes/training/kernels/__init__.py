"""Tensor expressions of what only training computes; attributes of blocks tell schedules what they are."""
