"""Decoder-only models of transformers."""
