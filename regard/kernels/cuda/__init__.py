"""Triton kernels and the functions or custom operators that launch them."""
