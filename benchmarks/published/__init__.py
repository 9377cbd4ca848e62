"""Published experiments, a file for each."""
