"""Vision Transformers of timm imported by Regard and, where a class exists, exported to transformers.

    python benchmarks/vit_import.py
    python benchmarks/vit_import.py vit_base_patch16_224 deit_base_distilled_patch16_384

Needs timm and transformers. Every model gets random weights, is saved by timm, imported by Regard and, where
transformers has a class for it, exported by Regard and loaded by transformers. Prints the largest difference of the
logits from those of timm, for random images, and the largest logit. Nothing is downloaded.
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
    "deit3_small_patch16_224",  # LayerScale, no position embedding of the class token
    "vit_small_patch14_reg4_dinov2",  # registers and class token
    "vit_wee_patch16_reg1_gap_256",  # no class token, norm after mean pooling
    "vit_medium_patch16_gap_256",  # no bias in query, key and value projections
)


@torch.no_grad()
def compare(name: str, folder: Path, count: int) -> str:
    torch.manual_seed(0)
    timm_model = timm.create_model(name, pretrained=False).eval()
    for parameter in timm_model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)  # so that no factor or bias is close to 0
    save_for_hf(timm_model, folder / "timm", safe_serialization=True)
    settings = timm_model.pretrained_cfg
    mean, std = (torch.tensor(settings[key])[:, None, None] for key in ("mean", "std"))
    images = torch.rand(count, *settings["input_size"])
    expected = timm_model((images - mean) / std)

    pipeline = import_huggingface(folder / "timm")
    gap = (pipeline.model(images) - expected).abs().max()
    line = f"{name}: logits up to {expected.abs().max():.1f}, Regard differs by {gap:.1e}"
    try:
        class_name = export_huggingface(pipeline, folder / "transformers")
    except RegardError:
        return f"{line}; transformers has no class for it"
    exported = getattr(transformers, class_name).from_pretrained(folder / "transformers").eval()
    logits = exported((images - mean) / std).logits
    return f"{line}, transformers' {class_name} by {(logits - expected).abs().max():.1e}"


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
