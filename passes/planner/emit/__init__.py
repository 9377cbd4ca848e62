"""From decisions to a placed plan: steps on lanes, and places for their buffers.

`materialize.py` is the way in: `insert_copies.py` makes the steps, `waits.py` drops waits that others imply,
`reuse_buffers.py` and `offsets.py` pack the buffers, `slack.py` shortens live ranges, `timeline.py` says when
each step runs; `resident_states.py` and `recover.py` start from a plan that exists.
"""
