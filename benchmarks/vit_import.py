"""Vision Transformers of timm, and what becomes of them here and, where a class fits, in transformers.

    python benchmarks/vit_import.py
    python benchmarks/vit_import.py vit_base_patch16_224 deit_base_distilled_patch16_384

Needs timm and transformers. Every model gets weights drawn at random, is written by timm, read by Regard and, where
transformers has a class for it, written by Regard and read by transformers. Printed is the largest difference between
timm's logits and those of the others, for images drawn at random, and the largest logit. Nothing is downloaded.
"""

import argparse
import tempfile
from pathlib import Path

import timm
import torch
import transformers
from timm.models import save_for_hf

from regard.errors import RegardError
from regard.interop import export_huggingface, import_huggingface

MODELS = (
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",  # LayerScale, no positions of the class token
    "vit_small_patch14_reg4_dinov2",  # registers beside the class token
    "vit_wee_patch16_reg1_gap_256",  # no class token, a norm after the mean
    "vit_medium_patch16_gap_256",  # no bias of queries, keys and values
)


@torch.no_grad()
def compare(name: str, folder: Path, count: int) -> str:
    torch.manual_seed(0)
    theirs = timm.create_model(name, pretrained=False).eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)  # so that no factor is nearly 0 and no bias is
    save_for_hf(theirs, folder / "timm", safe_serialization=True)
    about = theirs.pretrained_cfg
    mean, std = (torch.tensor(about[key])[:, None, None] for key in ("mean", "std"))
    images = torch.rand(count, *about["input_size"])
    wanted = theirs((images - mean) / std)

    bundle = import_huggingface(folder / "timm")
    gap = (bundle.model(images) - wanted).abs().max()
    line = f"{name}: logits up to {wanted.abs().max():.1f}, ours differ by {gap:.1e}"
    try:
        there = export_huggingface(bundle, folder / "transformers")
    except RegardError:
        return f"{line}; transformers has no such class"
    again = getattr(transformers, there).from_pretrained(folder / "transformers").eval()
    other = again((images - mean) / std).logits
    return f"{line}, those of transformers' {there} by {(other - wanted).abs().max():.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--images", type=int, default=2)
    options = parser.parse_args()
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            print(compare(name, Path(folder), options.images), flush=True)


if __name__ == "__main__":
    main()
