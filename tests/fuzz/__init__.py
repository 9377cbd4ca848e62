"""Random damage to everything that hybridc reads: one file per kind of input, over `driver.py`.

`python -m tests.fuzz.models --minutes 20 --seed 1` draws inputs for that long and prints what became of them
as JSON; `--only 17` draws the 17th again, in this process, where a debugger can look at it. `make fuzz` runs
all harnesses one after the other.
"""
