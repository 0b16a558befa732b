"""Kernels in Triton for layers, the source alone: each is called by the layer's file that bears its name.

They lie here since whatever checks shapes while testing wraps the functions of `layers`, and Triton reads their source.
"""
