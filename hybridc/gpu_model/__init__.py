"""Times of CUDA kernels, estimated without a GPU.

`estimate.py` reads a kernel's machine code (`sass/`): `memory.py` what its accesses cost, `trace.py` one
multiprocessor's share of the grid, `simulate.py` how long that takes, `footprint.py` what memory has to move,
`counters.py` what there is to improve. `fast.py` is a closed form of the same from a few counts, which
`work.py` reads off machine code and `tir.py` off TVM's loops. Speeds are those of a machine profile's GPU
(`hybridc/machine.py`), of its `architecture.py`, and of `chip.py`, which has the few constants that are
customary or fitted.
"""
