"""Types of at most 8 bits: a byte holds the code of an element. Begin with `formats.py`."""
