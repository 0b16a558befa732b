"""Functions that Triton kernels share."""
