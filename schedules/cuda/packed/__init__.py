"""Products with packed weights, which become numbers in registers."""
