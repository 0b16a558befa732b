"""Encoder-only models of transformers."""
