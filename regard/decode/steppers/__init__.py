"""Steppers: how the logits of the next tokens are computed. The model itself, and accelerations of it."""
