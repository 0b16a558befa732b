"""Decoding with compiled CPU kernels, in several worker processes."""
