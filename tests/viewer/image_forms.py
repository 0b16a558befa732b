"""Small image models of every form that a config can have, and looks at them."""

import torch

import regard
from regard.attention import SCORES
from regard.models import ViT
from regard.models.vit import vit_pico
from tests.viewer.forms import opinionated
from tests.viewer.seeing import KINDS, LABELS, SIZES, images

# Every way from pixels to tokens, every position, every way to an answer; and every score.
FORMS = {
    **KINDS,
    "convolution": dict(patches="convolution", registers=1, prefix_positions=False),
    "stem": dict(patches="stem", pooling="mean", positions="sinusoidal"),
    "rotary, class": dict(positions="rotary", registers=2, patches="stem"),
    "sinusoidal, query": dict(positions="sinusoidal", pooling="query", layer_scale=0.3),
    "grey, post": dict(channels=1, norm="post", qk_norm=True, norm_kind="rms", mean=(0.4,), std=(0.3,)),
    "means of channels": dict(mean=(0.1, 0.5, 0.7), std=(0.2, 0.3, 0.4), pooling="mean", activation="swiglu"),
    "distilled, mapped": dict(distilled=True, pooled_map=True, pooled_norm=True),
    "linear": dict(head="segment", pooling="class"),
    "queries": dict(head="segment", segmenter="queries", pooling="mean", registers=1, positions="rotary"),
    "features": dict(head="none", pooled_map=True),
    "pixels": dict(head="pixels", decoder_width=32, positions="none", pooling="mean"),
    **{score: dict(score=score) for score in SCORES},
}


def model_of(form: str) -> ViT:
    torch.manual_seed(0)
    return opinionated(ViT(vit_pico(**(SIZES | dict(layers=2, labels=LABELS, pooling="class") | FORMS[form]))))


def looked(form: str, model: ViT | None = None, height=8, width=12):
    model = model or model_of(form)
    picture = images(height=height, width=width)[0][: model.config.channels]
    return regard.look(model, picture)
