"""A training run: its setup, plan, output folder, state and log."""
