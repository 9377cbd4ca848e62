"""The program that Relax passes hand on: a module, its weights, and where its bindings come from.

Read `program.py` first; `operators.py` is the table of operators, `prim_funcs.py` makes the distinct
PrimFuncs of a network, `nan_semantics.py` gives minima and maxima the semantics of ONNX for NaN.
"""
