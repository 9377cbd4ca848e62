"""Convolutions of float16 with 3x3 taps by Winograd's algorithm on tensor cores."""
