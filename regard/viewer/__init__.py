"""What a model regarded: measurements, word alignments, pictures."""

from regard.viewer.alignment import (
    Link,
    align,
    alignment_error_rate,
    best_layer,
    clearest_layer,
    format_links,
    read_links,
)
from regard.viewer.beams import BeamNode, BeamTree, watch_decoding
from regard.viewer.changes import (
    Change,
    HeadOff,
    LayerOff,
    MaskOff,
    PositionsOff,
    RowSet,
    ScaleOff,
    tried,
)
from regard.viewer.comparing import Comparison, compare
from regard.viewer.forcing import attentions, force, need_attention
from regard.viewer.looking import AttentionMap, Look, look
from regard.viewer.overlays import ImageLook, PatchMap
from regard.viewer.rollout import Rollout, roll_out
from regard.viewer.trying import Outcome, Step, Tried, try_it
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
