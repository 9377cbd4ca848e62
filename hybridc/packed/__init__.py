"""Weights of few bits with a scale for each block: what frontend and schedules both know of how they lie."""
