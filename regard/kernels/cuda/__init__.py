"""GPU kernels: custom operators that launch the Triton sources of `kernels.triton`."""
