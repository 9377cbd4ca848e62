"""From decisions to a plan: steps on lanes, and places for their buffers.

`materialize.py` is the way in: `insert_copies.py` makes the steps, `reuse_buffers.py` and `offsets.py` pack
their buffers, `slack.py` shortens live ranges; `resident_states.py` and `recover.py` start from a plan that
exists.
"""
