"""Attention maps of a model: recording, measurements, word alignments, plots, experiments, and the page."""

from regard.viewer.alignment import (
    Link,
    align,
    alignment_error_rate,
    best_layer,
    clearest_layer,
    format_links,
    read_links,
)
from regard.viewer.beams import SearchNode, SearchTree, watch_decoding
from regard.viewer.changes import (
    HeadOff,
    Intervention,
    LayerOff,
    MaskOff,
    PositionsOff,
    RowSet,
    ScaleOff,
    tried,
)
from regard.viewer.comparing import Comparison, compare
from regard.viewer.forcing import attentions, need_attention, record_teacher_forced
from regard.viewer.looking import AttentionMap, Look, look
from regard.viewer.overlays import ImageLook, PatchMap
from regard.viewer.rollout import Rollout, roll_out
from regard.viewer.trying import Experiment, Outcome, PredictionStep, try_it
from regard.viewer.walk.page_walk import walk_of
from regard.viewer.walk.walkthrough import Walk

__all__ = [
    "AttentionMap",
    "Comparison",
    "Experiment",
    "HeadOff",
    "ImageLook",
    "Intervention",
    "LayerOff",
    "Link",
    "Look",
    "MaskOff",
    "Outcome",
    "PatchMap",
    "PositionsOff",
    "PredictionStep",
    "Rollout",
    "RowSet",
    "ScaleOff",
    "SearchNode",
    "SearchTree",
    "Walk",
    "align",
    "alignment_error_rate",
    "attentions",
    "best_layer",
    "clearest_layer",
    "compare",
    "format_links",
    "look",
    "need_attention",
    "read_links",
    "record_teacher_forced",
    "roll_out",
    "tried",
    "try_it",
    "walk_of",
    "watch_decoding",
]
