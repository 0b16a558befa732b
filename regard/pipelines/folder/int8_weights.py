"""int8 weights of linear layers in model folders: one scale per output channel, as in int8 decoding."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.kernels.cpu.int8_linear import quantize_weight

SCALE_SUFFIX = "_scale"
"""the scales of the int8 tensor `layer.weight` are in the float32 tensor `layer.weight_scale`"""


@torch.no_grad()
def quantize_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model, with the weights of its linear layers as int8 and their scales.

    The output layer often shares the embedding, which then is int8 too; tied weights are stored once. Other embeddings,
    biases and norms stay float32.

    >>> {name: str(tensor.dtype) for name, tensor in quantize_weights(nn.Linear(4, 2)).items()}
    {'weight': 'torch.int8', 'weight_scale': 'torch.float32', 'bias': 'torch.float32'}
    """
    is_linear = {id(module.weight) for module in model.modules() if type(module) is nn.Linear}
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().cpu().float()
        if id(parameter) not in is_linear:
            weights[name] = tensor
            continue
        if not tensor.isfinite().all():
            raise RegardError(
                f"The weight {name} is not finite and cannot be saved as int8.",
                "Its training diverged: train the model again.",
            )
        weights[name], weights[name + SCALE_SUFFIX] = quantize_weight(tensor)
    return weights


def dequantize_weights(weights: Mapping[str, Tensor], origin: str | Path) -> dict[str, Tensor]:
    """The tensors of `quantize_weights` in float32. Quantizing them again gives the same int8 values and scales.

    >>> q, scale = torch.tensor([[127, -3]], dtype=torch.int8), torch.tensor([0.5])
    >>> dequantize_weights({"weight": q, "weight_scale": scale}, "memory")
    {'weight': tensor([[63.5000, -1.5000]])}
    """
    dequantized: dict[str, Tensor] = {}
    used = set()
    for name, tensor in weights.items():
        if tensor.dtype != torch.int8:
            dequantized[name] = tensor
            continue
        scale_name = name + SCALE_SUFFIX
        scale = weights.get(scale_name)
        if scale is None:
            raise _scale_error(origin, f"the int8 tensor {name} has no scales ({scale_name} is missing)")
        if tensor.dim() != 2 or scale.dtype != torch.float32 or scale.shape != tensor.shape[:1]:
            shape = f"{str(scale.dtype).removeprefix('torch.')} of shape {tuple(scale.shape)}"
            raise _scale_error(origin, f"{scale_name} is {shape}, for {name} of shape {tuple(tensor.shape)}")
        if not (scale.isfinite() & (scale > 0)).all():
            raise _scale_error(origin, f"{scale_name} must be positive and finite")
        dequantized[name] = tensor.float().mul_(scale[:, None])
        used.add(scale_name)
    return {name: tensor for name, tensor in dequantized.items() if name not in used}


def _scale_error(origin: str | Path, detail: str) -> RegardError:
    return RegardError(f"{origin}: {detail}.", "Restore the file from a good copy.")
