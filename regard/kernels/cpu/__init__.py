"""Compiled CPU kernels (numba)."""
