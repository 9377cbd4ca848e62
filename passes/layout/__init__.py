"""Layouts of activations: blocked ones where a CPU runs alone, channels last beside a GPU.

Beside a GPU `channels_last.py` chooses between planes and channels last; `stages/tile.py` hands both forms to
the planner. All else is stage `layout`, the blocked layout of convolutional networks, where there is no GPU:
`layout.py` is the stage, `state.py` records the forms of each tensor; the others make operators, weights and
functions of training steps for blocked tensors.

Terms: *plain* data are NCHW, `[N, C, H, W]`; *blocked* data are NCHWc, `[N, ceil(C / b), H, W, b]`, as in
oneDNN. A *block* is b channels, b being the *lanes* (elements of float32) of a vector register or of half of
one. *Filling* are the channels that pad the last block where b does not divide C.
"""
