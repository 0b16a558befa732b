"""Attention maps of a model: recording, measurements, word alignments, plots, experiments, and the page."""

from regard.evaluation.alignment import (
    Link,
    align,
    alignment_error_rate,
    best_layer,
    format_links,
    read_links,
    sharpest_layer,
)
from regard.evaluation.teacher_forcing import attention_names, record_teacher_forced, require_attention
from regard.viewer.comparison import Comparison, compare
from regard.viewer.experiments import Experiment, Outcome, PredictionStep, run_experiment
from regard.viewer.image_look import ImageLook, PatchMap
from regard.viewer.interventions import (
    AblateHead,
    AblateLayer,
    Intervention,
    RemoveMask,
    RemovePositions,
    RemoveScale,
    SetAttentionRow,
    apply_interventions,
)
from regard.viewer.rollout import Rollout, attention_rollout
from regard.viewer.search_tree import SearchNode, SearchTree, record_search
from regard.viewer.text_look import AttentionMap, Look, look
from regard.viewer.walk.page_walk import build_walk
from regard.viewer.walk.walkthrough import Walk

__all__ = [
    "AblateHead",
    "AblateLayer",
    "AttentionMap",
    "Comparison",
    "Experiment",
    "ImageLook",
    "Intervention",
    "Link",
    "Look",
    "Outcome",
    "PatchMap",
    "PredictionStep",
    "RemoveMask",
    "RemovePositions",
    "RemoveScale",
    "Rollout",
    "SearchNode",
    "SearchTree",
    "SetAttentionRow",
    "Walk",
    "align",
    "alignment_error_rate",
    "apply_interventions",
    "attention_names",
    "attention_rollout",
    "best_layer",
    "build_walk",
    "compare",
    "format_links",
    "look",
    "read_links",
    "record_search",
    "record_teacher_forced",
    "require_attention",
    "run_experiment",
    "sharpest_layer",
]
