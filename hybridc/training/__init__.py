"""Training under a GPU memory budget: compile a training step, run it, and run it often."""
