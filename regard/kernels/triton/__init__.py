"""GPU kernels in Triton, and the functions or custom operators that launch them."""
