"""Products of matrices, and convolutions as such, in tiles that blocks of threads keep in registers."""
