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
from regard.viewer.forcing import attentions, force, need_attention
from regard.viewer.looking import AttentionMap, Look, look

__all__ = [
    "AttentionMap",
    "Link",
    "Look",
    "align",
    "alignment_error_rate",
    "attentions",
    "best_layer",
    "clearest_layer",
    "force",
    "format_links",
    "look",
    "need_attention",
    "read_links",
]
