"""The search for the fastest plan.

`partition.py` is the way in: `budget_grid.py` searches at fixed budgets and between them, `search.py`
anneals from the starts of `policies.py` and gives a `SearchResult`, `proof.py` takes the optimum of small
graphs instead.
"""
