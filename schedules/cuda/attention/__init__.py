"""Attention whose scores never reach memory, by what multiplies: tensor cores, plain cores, or warps that share keys."""
