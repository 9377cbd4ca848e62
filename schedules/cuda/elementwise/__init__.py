"""Functions whose every element is computed by itself."""
