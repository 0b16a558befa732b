"""Fusion of residual sums with the norms after them, as a change of a built model (CUDA, Triton)."""

import torch
from torch import Tensor, nn

from regard.attention.offsets import Lengths, Offsets
from regard.kernels.triton import add_norm
from regard.layers.blocks import Attend, PostNormBlock, PreNormBlock, Residual, SandwichBlock, TransformerBlock
from regard.layers.norms import RMSNorm


def fuse_residuals(model: nn.Module) -> nn.Module:
    """The same model, whose blocks compute a residual sum, its dropout and the next norm as one kernel where it runs.

    Weights and their names stay, and so do blocks with LayerScale or stochastic depth.

    >>> from regard.layers.blocks import BlockConfig
    >>> type(fuse_residuals(BlockConfig(16, heads=4, feedforward=32).make_block("scaled_dot"))).__name__
    'FusedPreNormBlock'
    """
    for block in model.modules():
        residuals = [child for child in block.children() if isinstance(child, Residual)]
        if type(block) in FUSED and all(r.layer_scale is None and r.drop_path is None for r in residuals):
            block.__class__ = FUSED[type(block)]
    return model


class FusedPreNormBlock(PreNormBlock):
    """`PreNormBlock`, fused in training: for single decoded tokens the launch overhead dominates."""

    def sublayers(
        self, x: Tensor, attention: Attend, cross: Attend | None = None, offsets: Offsets | Lengths | None = None
    ) -> Tensor:
        if not self.training:
            return super().sublayers(x, attention, cross, offsets)
        next_norm = self.feedforward_norm if cross is None else self.cross_norm
        x, h = sum_and_norm(x, attention(self.attention_norm(x)), self.attention_residual, next_norm)
        if cross is not None:
            x, h = sum_and_norm(x, cross(h), self.cross_residual, self.feedforward_norm)
        return x + self.feedforward_residual(self.feedforward(h), offsets)


class FusedPostNormBlock(PostNormBlock):
    """`PostNormBlock`, fused for packed tokens if the residual stream has the dtype of the update."""

    def sublayers(
        self, x: Tensor, attention: Attend, cross: Attend | None = None, offsets: Offsets | Lengths | None = None
    ) -> Tensor:
        if x.dim() != 2:
            return super().sublayers(x, attention, cross, offsets)
        x = sum_and_norm(x, attention(x), self.attention_residual, self.attention_norm, keeps_dtype=True)[1]
        if cross is not None:
            x = sum_and_norm(x, cross(x), self.cross_residual, self.cross_norm, keeps_dtype=True)[1]
        update = self.feedforward(x)
        return sum_and_norm(x, update, self.feedforward_residual, self.feedforward_norm, keeps_dtype=True)[1]


class FusedSandwichBlock(SandwichBlock):
    """`SandwichBlock`, fused in training."""

    def sublayers(
        self, x: Tensor, attention: Attend, cross: Attend | None = None, offsets: Offsets | Lengths | None = None
    ) -> Tensor:
        if not self.training:
            return super().sublayers(x, attention, cross, offsets)
        update = self.attention_output_norm(attention(self.attention_norm(x)))
        x, h = sum_and_norm(x, update, self.attention_residual, self.feedforward_norm)
        return x + self.feedforward_residual(self.feedforward_output_norm(self.feedforward(h)), offsets)


FUSED: dict[type[nn.Module], type[TransformerBlock]] = {
    PreNormBlock: FusedPreNormBlock,
    PostNormBlock: FusedPostNormBlock,
    SandwichBlock: FusedSandwichBlock,
}


def unfused(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of which another is the fused form, or the class itself.

    >>> unfused(FusedPreNormBlock).__name__, unfused(nn.Linear).__name__
    ('PreNormBlock', 'Linear')
    """
    return next((plain for plain, fused in FUSED.items() if fused is cls), cls)


def sum_and_norm(
    x: Tensor, update: Tensor, residual: Residual, norm: nn.Module, *, keeps_dtype: bool = False
) -> tuple[Tensor, Tensor]:
    """x + residual(update) and its norm; one kernel where it runs, with `keeps_dtype` only for one dtype."""
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    has_parameters = bias is not None or isinstance(norm, RMSNorm)
    if has_parameters and not (keeps_dtype and x.dtype != update.dtype) and add_norm.supports(x, update):
        assert isinstance(norm, nn.LayerNorm | RMSNorm)
        eps = norm.eps or torch.finfo(norm.weight.dtype).eps
        return add_norm.add_norm(x, update, norm.weight, bias, eps, residual.dropout.p if residual.training else 0.0)
    x = x + residual(update)
    return x, norm(x).to(x.dtype)
