"""What the planner decides about, and what a decision costs.

`context.py` is what all of planning refers to, `problem.py` and `decisions.py` are the data, `simulate.py`
runs decisions, `core.py` does so in C++; the others derive what both need: cost of kernels, kernel orders,
residency, rematerialisation, pins. No TVM inside.
"""
