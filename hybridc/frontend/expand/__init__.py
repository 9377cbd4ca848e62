"""Operators that become others before import: by the body that ONNX defines for them, or by one of ours.

A family of operators is a file; `table.EXPANSIONS` registers every operator once.
"""
