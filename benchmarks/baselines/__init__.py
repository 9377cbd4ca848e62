"""Methods of others, and exact ones for a part of the problem, that benchmarks hold the planner against."""
