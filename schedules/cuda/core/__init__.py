"""What all CUDA rules are built from: finding the main loop nest, launch bounds, loops bound to threads."""
