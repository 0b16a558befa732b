"""Device code: Triton and CPU kernels as functions of plain tensors, and the custom operators around them.

One file per kernel; its docstring names the plain PyTorch code that computes the same. `cpu/` holds CPU kernels,
`cuda/` those in Triton: launcher and source are one file. Nothing here depends on scores, masks, layers or models.
"""
