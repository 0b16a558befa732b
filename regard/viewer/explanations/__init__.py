"""Explanations of an output: effects of heads (ablation), logit lens, gradient × input attribution, rollout."""
