"""Products with packed weights (`hybridc/packed/layout.py`), which become numbers in registers or in a buffer
that stays in cache.

Begin with `packed.py`.
"""
