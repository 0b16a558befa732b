"""Reference implementation of timm's Vision Transformer, computed from its tensors by name."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-6


def reference_vit(tensors: Mapping[str, Tensor], pixels: Tensor, *, heads: int, pool: str = "token") -> Tensor:
    """Logits of normalized (B, C, H, W) pixels; the pooled output if there is no head."""

    def layer_norm(x: Tensor, name: str) -> Tensor:
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + EPS).sqrt() * weight + bias

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(()))

    def attention(x: Tensor, name: str) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in linear(x, f"{name}.qkv").chunk(3, dim=-1)
        )
        if f"{name}.q_norm.weight" in tensors:
            q, k = layer_norm(q, f"{name}.q_norm"), layer_norm(k, f"{name}.k_norm")
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return linear((weights @ v).transpose(1, 2).flatten(2), f"{name}.proj")

    kernel = tensors["patch_embed.proj.weight"]
    x = functional.conv2d(pixels, kernel, tensors["patch_embed.proj.bias"], stride=kernel.shape[-1]).flatten(2).mT
    prefix = [tensors[name] for name in ("cls_token", "dist_token", "reg_token") if name in tensors]
    prefix_length = sum(tokens.shape[1] for tokens in prefix)
    has_prefix_positions = tensors["pos_embed"].shape[1] == x.shape[1] + prefix_length
    x = x if has_prefix_positions else x + tensors["pos_embed"]
    x = torch.cat([*(tokens.expand(len(x), -1, -1) for tokens in prefix), x], dim=1)
    x = x + tensors["pos_embed"] if has_prefix_positions else x
    for i in range(len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})):
        name = f"blocks.{i}"
        x = x + tensors.get(f"{name}.ls1.gamma", 1) * attention(layer_norm(x, f"{name}.norm1"), f"{name}.attn")
        inner = functional.gelu(linear(layer_norm(x, f"{name}.norm2"), f"{name}.mlp.fc1"))
        x = x + tensors.get(f"{name}.ls2.gamma", 1) * linear(inner, f"{name}.mlp.fc2")
    x = layer_norm(x, "norm") if "norm.weight" in tensors else x
    if "dist_token" in tensors:
        return (linear(x[:, 0], "head") + linear(x[:, 1], "head_dist")) / 2
    x = x[:, 0] if pool == "token" else x[:, prefix_length:].mean(1)
    x = layer_norm(x, "fc_norm") if "fc_norm.weight" in tensors else x
    return linear(x, "head") if "head.weight" in tensors else x
