"""Device code: Triton and CPU kernels as functions of plain tensors, and the custom operators around them.

One file per kernel, which also launches it; its docstring names the plain PyTorch code that computes the same. `cpu/`
holds CPU kernels, `triton/` GPU kernels. Nothing here depends on scores, masks, layers or models.
"""
