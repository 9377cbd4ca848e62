"""LSTM, GRU and RNN: one kernel for all steps (`loops.py`), or where they are trained a few for each
(`unrolled.py`)."""
