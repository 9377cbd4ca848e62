"""Values of which data determine an extent: padded to a bound, with a count of the elements that there are.

`sources.py` makes them; `rules.py` and `rewrites.py` say what may become of them on the way to the outputs,
which a session cuts (`artifact/manifest.py`). A node that neither knows is refused: it would see the padding.
"""
