"""Stage `lower`: the functions that code is generated for, and what plans call them with."""
