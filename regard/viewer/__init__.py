"""What a model regarded: measurements, word alignments, pictures."""

from regard.evaluation.alignment import (
    Link,
    align,
    alignment_error_rate,
    best_layer,
    clearest_layer,
    format_links,
    read_links,
)
from regard.evaluation.teacher_forcing import attentions, force, need_attention
from regard.viewer.comparison import Comparison, compare
from regard.viewer.experiments import Outcome, Step, Tried, try_it
from regard.viewer.image_look import ImageLook, PatchMap
from regard.viewer.interventions import (
    Change,
    HeadOff,
    LayerOff,
    MaskOff,
    PositionsOff,
    RowSet,
    ScaleOff,
    tried,
)
from regard.viewer.rollout import Rollout, roll_out
from regard.viewer.search_tree import BeamNode, BeamTree, watch_decoding
from regard.viewer.text_look import AttentionMap, Look, look
from regard.viewer.walk.page_walk import walk_of
from regard.viewer.walk.walkthrough import Walk

__all__ = [
    "AttentionMap",
    "BeamNode",
    "BeamTree",
    "Change",
    "Comparison",
    "HeadOff",
    "ImageLook",
    "LayerOff",
    "Link",
    "Look",
    "MaskOff",
    "Outcome",
    "PatchMap",
    "PositionsOff",
    "Rollout",
    "RowSet",
    "ScaleOff",
    "Step",
    "Tried",
    "Walk",
    "align",
    "alignment_error_rate",
    "attentions",
    "best_layer",
    "clearest_layer",
    "compare",
    "force",
    "format_links",
    "look",
    "need_attention",
    "read_links",
    "roll_out",
    "tried",
    "try_it",
    "walk_of",
    "watch_decoding",
]
