"""Attention backends: each decides whether it supports a call and runs it, on kernels or on torch operations.

A backend is a module with two functions: `supports(call)` and `run(call)`. All need memory linear in the length. The
list of backends and their order of preference are in `regard.attention.dispatch`.
"""
