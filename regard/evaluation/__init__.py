"""Evaluation: metrics, word alignments, and `evaluate` for every kind of model."""
