"""Stage `canonicalize`: rewrite a network to the operators that later stages know.

`canonicalize.py` is the stage; every other file is a group of its rewrites.
"""
