"""Convolutions along one axis by discrete Fourier transforms of segments.

`fft_conv1d.py` is the rule, `dft.py` the transforms, `segments.py` how data are cut, `weight_spectra.py`
the filters.
"""
