"""From scheduled functions to machine code."""
