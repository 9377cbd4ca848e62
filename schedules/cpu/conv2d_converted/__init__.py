"""Convolutions of plain activations that are computed in the blocked layout, converted within the kernel."""
