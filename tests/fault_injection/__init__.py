"""Every call of CUDA and of the system that a session makes, failed once: what becomes of the session then.

`python -m tests.fault_injection` fails all of them, one after the other, and prints how many there were of
each kind as a table; the fast suite draws some. `trial.py` says what must hold, `faults.py` which calls there
are.
"""
