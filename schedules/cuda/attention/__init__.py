"""Attention whose scores never reach memory: by tensor cores, by plain cores, or by lanes that share keys."""
