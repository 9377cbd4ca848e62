"""What this computer really does: machine profiles, and times of a model's kernels, by measurement.

measure.py  a machine profile: peaks, launches, the shares of them that kernels reach, and the link
samples.py  kernels that stand for their families
fit.py      times of kernels -> efficiencies of families
profile.py  times of the functions of one model; rounding.py, errors of bf16; measurements.py, which to take
timers.py   one function on the CPU or the GPU; peaks.py, gpu_peak.py and link.py measure the rest,
sharing.py  what is left of a memory's bandwidth for kernels and copies at once
"""
