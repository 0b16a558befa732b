"""Small image models of every form that a config supports, with cached looks."""

from functools import cache

import torch

import regard
from regard.models import ViT
from regard.models.vit import vit_pico
from tests.viewer.image_helpers import LABELS, SIZES, images
from tests.viewer.text_models import amplify_weights

# Every patch embedding, positional encoding and head.
FORMS = {
    "class": dict(pooling="class"),
    "distilled": dict(distilled=True, registers=2, pooled_map=True, pooled_norm=True),
    "query": dict(pooling="query", registers=1, layer_scale=0.3, score="cosine"),
    "convolution": dict(patches="convolution", registers=1, prefix_positions=False),
    "stem": dict(patches="stem", pooling="mean", positions="sinusoidal", score="location"),
    "rotary": dict(positions="rotary", registers=2, pooled_norm=True, score="general"),
    "gray, post": dict(channels=1, norm="post", qk_norm=True, norm_kind="rms", mean=(0.4,), std=(0.3,)),
    "means of channels": dict(mean=(0.1, 0.5, 0.7), std=(0.2, 0.3, 0.4), pooling="mean", activation="swiglu"),
    "linear": dict(head="segment", pooling="class", score="concat"),
    "queries": dict(head="segment", segmenter="queries", pooling="mean", registers=1, positions="rotary"),
    "features": dict(head="none", pooled_map=True, score="dot"),
    "CLIP": dict(head="none", embedding_norm=True, patch_bias=False, pooled_norm=True, activation="quick_gelu"),
    "SigLIP": dict(pooling="query", pooling_feedforward=True, activation="gelu_tanh"),
    "DINOv2": dict(pooling="class_mean", registers=2, register_positions=False, layer_scale=0.5),
    "pixels": dict(head="pixels", decoder_width=32, positions="none", pooling="mean"),
}


def model_of(form: str) -> ViT:
    torch.manual_seed(0)
    return amplify_weights(ViT(vit_pico(**(SIZES | dict(layers=2, labels=LABELS, pooling="class") | FORMS[form]))))


def make_look(model: ViT, height=8, width=12):
    return regard.look(model, images(height=height, width=width)[0][: model.config.channels])


@cache
def cached_look(form: str, height=8, width=12):
    return make_look(model_of(form), height, width)
