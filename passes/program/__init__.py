"""What stands between two Relax passes: a module, its weights, and where its bindings come from.

`program.py` is read first; `prim_funcs.py` makes the distinct PrimFuncs of a network, `nan_semantics.py`
gives minima and maxima the semantics of ONNX for NaN.
"""
