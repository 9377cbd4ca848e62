"""One function per stage, from the record of one phase to that of the next.

In the order in which `passes/pipeline.py` has them: `program.py` rewrites operators and makes kernels of
them, `kernels.py` schedules, times and lists these, `tile.py` cuts large ones up, `plan.py` plans, checks and
lowers. `show.py` is what `--dump-ir` writes of each.
"""
