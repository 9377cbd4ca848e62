"""Recurrent cells: what frontend and schedules both know about LSTM, GRU and RNN.

The frontend computes `X W + b` of all steps by one matrix product. What is left is a `Recurrence`: steps in
order, each of which adds `h R` to its part of that product and applies activations, as ONNX defines them.

Begin with `cell.py`.
"""
