"""Matrix products in float32.

`matmul.py` and `skinny.py` (2 to 32 rows) are rules; `read.py` recognises the function, `kernel.py` is the
micro-kernel, `panel.py` packs, `strassen.py` is the fast algorithm.
"""
