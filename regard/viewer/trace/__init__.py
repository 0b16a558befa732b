"""The trace: every number between the input of a model and its output, step by step.

The steps are those of the model's graph (`regard.graph`), computed in float64 and compared with the model's own
forward.
"""
