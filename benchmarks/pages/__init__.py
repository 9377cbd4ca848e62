"""The tables of README.md and docs/benchmarks.md, made of benchmarks/results/*.json."""
