"""A Vision Transformer of timm in plain steps, straight from its tensors by their names there."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-6


def plain_vit(tensors: Mapping[str, Tensor], pixels: Tensor, *, heads: int, pool: str = "token") -> Tensor:
    """Logits of (B, C, H, W) pixels that are normalised already; or what is pooled, if there is no head."""

    def normed(x: Tensor, name: str) -> Tensor:
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + EPS).sqrt() * weight + bias

    def mapped(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(()))

    def attended(x: Tensor, name: str) -> Tensor:
        q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in mapped(x, f"{name}.qkv").chunk(3, dim=-1))
        if f"{name}.q_norm.weight" in tensors:
            q, k = normed(q, f"{name}.q_norm"), normed(k, f"{name}.k_norm")
        shares = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return mapped((shares @ v).transpose(1, 2).flatten(2), f"{name}.proj")

    kernel = tensors["patch_embed.proj.weight"]
    x = functional.conv2d(pixels, kernel, tensors["patch_embed.proj.bias"], stride=kernel.shape[-1]).flatten(2).mT
    first = [tensors[name] for name in ("cls_token", "dist_token", "reg_token") if name in tensors]
    prefix = sum(one.shape[1] for one in first)
    whole = tensors["pos_embed"].shape[1] == x.shape[1] + prefix
    x = x if whole else x + tensors["pos_embed"]
    x = torch.cat([*(one.expand(len(x), -1, -1) for one in first), x], dim=1)
    x = x + tensors["pos_embed"] if whole else x
    for i in range(len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})):
        name = f"blocks.{i}"
        x = x + tensors.get(f"{name}.ls1.gamma", 1) * attended(normed(x, f"{name}.norm1"), f"{name}.attn")
        inner = functional.gelu(mapped(normed(x, f"{name}.norm2"), f"{name}.mlp.fc1"))
        x = x + tensors.get(f"{name}.ls2.gamma", 1) * mapped(inner, f"{name}.mlp.fc2")
    x = normed(x, "norm") if "norm.weight" in tensors else x
    if "dist_token" in tensors:
        return (mapped(x[:, 0], "head") + mapped(x[:, 1], "head_dist")) / 2
    x = x[:, 0] if pool == "token" else x[:, prefix:].mean(1)
    x = normed(x, "fc_norm") if "fc_norm.weight" in tensors else x
    return mapped(x, "head") if "head.weight" in tensors else x
