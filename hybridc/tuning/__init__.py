"""Measured choice among the tiles that the CPU rules offer.

tuner.py    what the options ask for, as the chooser that scheduling takes
search.py   which functions to measure, and for how long
measure.py  compile one scheduled function and time it on cold buffers
record.py   the file that keeps what was measured
"""

from hybridc.tuning.tuner import Tuner, tuner_of

__all__ = ["Tuner", "tuner_of"]
