"""Plans at shares of memory drawn at random, of networks that nobody tuned the planner for among others.

`points.py` draws them, `judge.py` plans one and says how good the plan is; `python benchmarks/plans.py
--drawn COUNT` runs both.
"""
