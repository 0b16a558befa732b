"""Decoding in CUDA graphs of fused kernels."""
