"""Random Vision Transformers of transformers, and comparison of their outputs and attention with imported models."""

import json
import re

import torch

from regard.attention import record
from regard.attention.exact_weights import compute_weights
from tests.interop.model_comparison import random_model

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NAMES = {0: "cat", 1: "dog", 2: "owl"}

_SIZES = dict(hidden_size=30, num_attention_heads=5, num_hidden_layers=2, intermediate_size=37)
CONFIGS = [
    dict(_SIZES, image_size=[8, 12], patch_size=4),
    dict(_SIZES, image_size=8, patch_size=[2, 2], qkv_bias=False, num_channels=1, hidden_act="gelu_new"),
    dict(_SIZES, hidden_size=24, num_attention_heads=1, num_hidden_layers=3, image_size=15, patch_size=5)
    | dict(hidden_act="relu", layer_norm_eps=1e-3),
]


_DINO_SIZES = dict(hidden_size=24, num_attention_heads=2, num_hidden_layers=2, image_size=12, patch_size=4)
TOWER_CONFIGS = {
    "Dinov2": [
        dict(_DINO_SIZES, use_mask_token=False),
        dict(_DINO_SIZES, use_mask_token=False, use_swiglu_ffn=True, mlp_ratio=3, layerscale_value=0.1, image_size=8),
        dict(_DINO_SIZES, use_mask_token=False, qkv_bias=False, num_channels=1, hidden_act="relu", layer_norm_eps=1e-3),
    ],
    "Dinov2WithRegisters": [
        dict(_DINO_SIZES),
        dict(_DINO_SIZES, num_register_tokens=1, use_swiglu_ffn=True),
        dict(_DINO_SIZES, num_register_tokens=3, mlp_ratio=2, patch_size=6, hidden_act="gelu_new"),
    ],
    "CLIPVision": [
        dict(_DINO_SIZES, intermediate_size=37),
        dict(_DINO_SIZES, intermediate_size=40, hidden_act="gelu", patch_size=6, layer_norm_eps=1e-3, num_channels=1),
        dict(
            _DINO_SIZES,
            intermediate_size=31,
            hidden_act="gelu_pytorch_tanh",
            num_hidden_layers=3,
            num_attention_heads=3,
        ),
    ],
    "SiglipVision": [
        dict(_DINO_SIZES, intermediate_size=37),
        dict(_DINO_SIZES, intermediate_size=40, hidden_act="relu", patch_size=6, layer_norm_eps=1e-3, num_channels=1),
        dict(_DINO_SIZES, intermediate_size=31, hidden_act="quick_gelu", vision_use_head=False),
    ],
}


def make_hf_model(transformers, name, index, folder, **changes):
    """A random model of transformers, saved to a folder."""
    family = re.split("Model|For", name)[0]
    config = getattr(transformers, f"{family}Config")
    sizes = TOWER_CONFIGS.get(family, CONFIGS)[index]
    model = random_model(getattr(transformers, name), config(**sizes | changes), folder)
    masks = [parameter for key, parameter in model.named_parameters() if key.endswith("mask_token")]
    if masks:  # read in pre-training only; exported as zeros
        torch.nn.init.zeros_(masks[0])
        model.save_pretrained(folder)
    write_preprocessor(folder, model.config.num_channels)
    return model


def write_preprocessor(folder, channels=3, **changes):
    table = {"do_normalize": True, "image_mean": MEAN[:channels], "image_std": STD[:channels]}
    (folder / "preprocessor_config.json").write_text(json.dumps(table | changes))


def random_images(model, size=None, count=2):
    torch.manual_seed(5)
    size = size or model.config.image_size
    sides = (size, size) if isinstance(size, int) else size
    return torch.rand(count, model.config.num_channels, *sides)


def normalize_pixels(images):
    mean, std = (torch.tensor(values[: images.shape[1]])[:, None, None] for values in (MEAN, STD))
    return (images - mean) / std


@torch.no_grad()
def run_hf_model(model, images, **options):
    return model(normalize_pixels(images), output_attentions=True, **options)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@torch.no_grad()
def assert_same_attention(model, images, expected):
    """Compares the attention of all tokens, then of those that the output needs; returns encoding and output."""
    with record(model) as recording:
        encoded = model.encode(images)
    maps = [compute_weights(call) for attention in recording.values() for call in attention.calls]
    for weights, expected_weights in zip(maps, expected.attentions, strict=True):
        assert_close(weights, expected_weights)
    with record(model) as recording:
        output = model(images)
    [last] = recording[f"blocks.{len(maps) - 1}.attention"].calls
    used = compute_weights(last)
    assert_close(used, expected.attentions[-1][:, :, : used.shape[2]])
    return encoded, output
