"""The planner: from a graph, a machine and a budget to the fastest plan that can be found, and a bound.

What is decided, and what comes of it:
problem     kernels in an order, tensors, gaps between their uses, as flat tuples
decisions   a device for each kernel; for each gap whether the tensor stays in the GPU's memory
residency   decisions -> when each tensor is on the GPU, and what has to be copied
simulate    decisions -> when every kernel and copy runs, and the bytes that are held
core        the same in C++, with repair, annealing, and tidying up copies: what searches call
materialize     decisions -> steps, and places for their buffers
slack       later times for steps where fewer bytes are held then, and nothing takes longer

How it is decided:
order       an order of the kernels that needs few bytes
repeats     kernels that may run again instead of their results being kept or fetched
policies    other systems' ways, to compare with; starts for the search
search      the best decisions found: from the best starts, simulated annealing
ladder      searches at fixed budgets from low to high, so that more memory is never slower
proof       a small graph's fastest plan of all instead

What is proven:
bound       no plan is faster, none needs fewer bytes
chain       a tighter bound for chains of kernels: a dynamic programme over stages, by sweep on a frontier
relaxation  the planning problem as a linear programme, which linear solves
exact       the fastest plan by CP-SAT in a child process; retime gives its jobs their real times

No TVM inside.
"""
