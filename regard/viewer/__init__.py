"""Attention maps of a model: recording, measurements, word alignments, plots, experiments, and the page."""

from regard.viewer.comparison import Comparison, compare
from regard.viewer.experiments import run_experiment
from regard.viewer.image_look import ImageLook
from regard.viewer.interventions import (
    AblateHead,
    AblateLayer,
    RemoveMask,
    RemovePositions,
    RemoveScale,
    SetAttentionRow,
    apply_interventions,
)
from regard.viewer.rollout import attention_rollout
from regard.viewer.search_tree import SearchTree, record_search
from regard.viewer.text_look import AttentionMap, Look, look
from regard.viewer.trace.build import build_trace

__all__ = [
    "AblateHead",
    "AblateLayer",
    "AttentionMap",
    "Comparison",
    "ImageLook",
    "Look",
    "RemoveMask",
    "RemovePositions",
    "RemoveScale",
    "SearchTree",
    "SetAttentionRow",
    "apply_interventions",
    "attention_rollout",
    "build_trace",
    "compare",
    "look",
    "record_search",
    "run_experiment",
]
