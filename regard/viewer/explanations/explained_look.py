"""Explanations that looks at texts and at images have in common."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.viewer.explanations.head_effects import HeadEffects
    from regard.viewer.explanations.logit_lens import LogitLens


class ExplainedLook:
    """Base class of looks, whose output can be explained."""

    def head_effects(self: Any) -> "HeadEffects":
        """The change of the output's log-probability if a head is ablated, for every head (see `HeadEffects`).

        >>> look(translator, "The cat sleeps.").head_effects().largest  # doctest: +SKIP
        ('decoder.1.cross', 2)
        """
        from regard.viewer.explanations.head_effects import compute_head_effects

        return compute_head_effects(self)

    def logit_lens(self: Any) -> "LogitLens":
        """What the model would predict after each layer (see `LogitLens`).

        >>> look(translator, "The cat sleeps.").logit_lens().candidates(1, 0)  # doctest: +SKIP
        {'le': 0.93, 'la': 0.04, 'un': 0.01, 'une': 0.01, 'les': 0.0}
        """
        from regard.viewer.explanations.logit_lens import compute_logit_lens

        return compute_logit_lens(self)
