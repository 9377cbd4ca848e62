"""Convolutions with 3x3 taps by Winograd's algorithm F(2x2, 3x3); `winograd.py` has the rule."""
