"""Attention on a CPU in tasks of some rows, which keep their scores in L1."""
