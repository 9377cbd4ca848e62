"""Gradients of convolutions with respect to their weights."""
