"""The planner: from a graph, a machine and a GPU memory budget to the fastest plan found, and a bound on it.

No TVM inside: all is counted in microseconds and bytes. `make_plans.py` is the way in. Folders, each of
which imports only those above it, and none imports the files here:

model/      what is decided (Problem, Decisions), and what comes of it (simulate -> SimulatedRun)
bounds/     what no plan can beat: a linear programme, the optimum of small graphs, a tighter bound of chains
emit/       decisions -> steps and buffers: materialize -> PlacedPlan
search/     the best decisions for each budget: search -> SearchResult, plan_all_budgets over the budget grid

`choose_tilings.py` chooses the tilings of the network that are worth planning, `gpu_caches.py` which caches
of a decoder the GPU has, `tighten_bound.py` spends time on a better bound (`--bound-seconds`).
"""
