"""What a scheduled function may touch, whatever values it is fed.

A kernel says by markers (`hybridc/checks.py`) which indices and divisors are fed. `insert.py` makes checks
of them;
`guard.py`, to begin with, sees to it that no access and no division is left that some data could make
harmful.
"""
