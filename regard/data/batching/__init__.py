"""Batches: packed sequences of tokens and batches of images, in a reproducible order."""
