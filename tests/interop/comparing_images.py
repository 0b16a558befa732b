"""Vision Transformers of transformers with random weights, and pictures for them, beside what is read of them."""

import json

import torch

from regard.attention import record
from regard.attention.exact_weights import compute_weights
from tests.interop.comparing import random_model

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NAMES = {0: "cat", 1: "dog", 2: "owl"}

_SIZES = dict(hidden_size=30, num_attention_heads=5, num_hidden_layers=2, intermediate_size=37)
CONFIGS = [
    dict(_SIZES, image_size=[8, 12], patch_size=4),
    dict(_SIZES, image_size=8, patch_size=[2, 2], qkv_bias=False, num_channels=1, hidden_act="gelu_new"),
    dict(_SIZES, hidden_size=24, num_attention_heads=1, num_hidden_layers=3, image_size=15, patch_size=5)
    | dict(hidden_act="relu", layer_norm_eps=1e-3),
]


def made(transformers, name, number, folder, **changes):
    """A model of theirs and its folder."""
    config = getattr(transformers, f"{'DeiT' if name.startswith('DeiT') else 'ViT'}Config")
    model = random_model(getattr(transformers, name), config(**CONFIGS[number] | changes), folder)
    write_pictures(folder, model.config.num_channels)
    return model


def write_pictures(folder, channels=3, **changes):
    table = {"do_normalize": True, "image_mean": MEAN[:channels], "image_std": STD[:channels]}
    (folder / "preprocessor_config.json").write_text(json.dumps(table | changes))


def images_of(model, size=None, count=2):
    torch.manual_seed(5)
    given = size or model.config.image_size
    sides = (given, given) if isinstance(given, int) else given
    return torch.rand(count, model.config.num_channels, *sides)


def normalised(images):
    mean, std = (torch.tensor(one[: images.shape[1]])[:, None, None] for one in (MEAN, STD))
    return (images - mean) / std


@torch.no_grad()
def run_theirs(model, images, **more):
    return model(normalised(images), output_attentions=True, **more)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@torch.no_grad()
def compare(ours, images, theirs):
    """Every map of every token, and then only what the output asks for; the tokens and the output."""
    with record(ours) as recording:
        encoded = ours.encode(images)
    maps = [compute_weights(call) for one in recording.values() for call in one.calls]
    for own, other in zip(maps, theirs.attentions, strict=True):
        close(own, other)
    with record(ours) as recording:
        output = ours(images)
    [last] = recording[f"blocks.{len(maps) - 1}.attention"].calls
    asked = compute_weights(last)
    close(asked, theirs.attentions[-1][:, :, : asked.shape[2]])
    return encoded, output


def weights_of(bundle):
    return {name: parameter.detach() for name, parameter in bundle.model.named_parameters()}


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
