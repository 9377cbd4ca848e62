"""Training: forward pass, backward pass and update of the parameters become an ordinary program.

`step.py` is the way in, `differentiate.py` writes gradients by the rules of `rules/`; `spec.py` is what the
user asks for, which the command line reads without TVM.
"""
