"""Values of which data, or sizes of open dimensions, determine an extent: padded to a bound, with a count.

`sources.py` makes them, and `../ranges/` where inputs are padded; `rules.py` and `rewrites.py` say what may
become of them on the way to the outputs, which a session cuts (`artifact/manifest.py`). A node that neither
knows is refused: it would see the padding. `ledger.py` keeps what is known of each value.
"""
