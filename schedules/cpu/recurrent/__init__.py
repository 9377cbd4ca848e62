"""Recurrent networks: begin with `recurrent.py`."""
