"""Images per second of Vision Transformers at 224 pixels beside every peer that is installed; and mixed sizes.

    python benchmarks/images_speed.py --models tiny small --batch 512

Compilation takes longest; `--only timm` in processes side by side beforehand leaves what they compiled on disk.

Each entrant is compiled alike, runs in bf16 autocast, and is timed in turns with the others; the median round counts.
A training step is forward, loss, backward and a fused AdamW. Peers: timm, torchvision, transformers.
"""

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard.attention.offsets import Offsets
from regard.layers.patches import PackedImages, pack_images
from regard.models.vit import ViT, ViTConfig, vit_small, vit_tiny

LABELS, SIDE, PATCH = 1000, 224, 16
ROUNDS, STEPS = 5, 10
WHAT = ("training", "inference", "mixed")
SHAPES = {"tiny": (192, 3), "small": (384, 6)}


def entrants(name: str) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Whoever is installed, as a model that takes (B, 3, 224, 224) and gives (B, 1000)."""
    width, heads = SHAPES[name]
    labels = tuple(map(str, range(LABELS)))
    yield "Regard", lambda: ViT({"tiny": vit_tiny, "small": vit_small}[name](labels=labels))
    try:
        import timm

        yield "timm", lambda: timm.create_model(f"vit_{name}_patch16_224", num_classes=LABELS)
    except ImportError:
        pass
    try:
        from torchvision.models import VisionTransformer

        yield "torchvision", lambda: VisionTransformer(SIDE, PATCH, 12, heads, width, 4 * width, num_classes=LABELS)
    except ImportError:
        pass
    try:
        import transformers

        config = transformers.ViTConfig(
            hidden_size=width,
            num_attention_heads=heads,
            num_hidden_layers=12,
            intermediate_size=4 * width,
            num_labels=LABELS,
        )

        class Logits(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = transformers.ViTForImageClassification(config)

            def forward(self, images: Tensor) -> Tensor:
                return self.model(images).logits

        yield "transformers", Logits
    except ImportError:
        pass


def training_step(
    model: nn.Module, batches: Sequence[Tensor | PackedImages], labels: Tensor, compiled: bool = True
) -> Callable[[], None]:
    """A step with the next of the batches each time."""
    optimizer = torch.optim.AdamW(model.train().parameters(), fused=True)
    function = torch.compile(model, dynamic=False) if compiled else model
    stream = itertools.cycle(batches)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(function(next(stream)).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def inference_step(model: nn.Module, images: Tensor) -> Callable[[], None]:
    compiled = torch.compile(model.eval(), dynamic=False)

    @torch.inference_mode()
    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            compiled(images)

    return step


def seconds(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The median time of a step of each, in turns, after a few to warm up."""
    for step in steps.values():
        for _ in range(3):
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - began) / STEPS)
    return {name: statistics.median(times) for name, times in found.items()}


def one_size(name: str, batch: int, what: str, only: list[str]) -> None:
    images = torch.rand(batch, 3, SIDE, SIDE, device="cuda")
    labels = torch.randint(LABELS, (batch,), device="cuda")
    steps = {}
    for entrant, make in entrants(name):
        if only and entrant not in only:
            continue
        model = make().to("cuda")
        steps[entrant] = training_step(model, [images], labels) if what == "training" else inference_step(model, images)
    for entrant, time_ in seconds(steps).items():
        print(f"| ViT-{name}/16, {what} | {entrant} | {batch / time_:,.0f} |", flush=True)


def sizes(count: int, seed: int) -> list[tuple[int, int]]:
    """A spread as photographs have it: the longer side 96 to 384 pixels, portrait or landscape, whole patches."""
    generator = torch.Generator().manual_seed(seed)
    longer = (torch.exp(torch.randn(count, generator=generator) * 0.35) * 208).clamp(96, 384)
    ratio = torch.tensor([1.0, 4 / 3, 3 / 2, 16 / 9])[torch.randint(4, (count,), generator=generator)]
    sides = torch.stack((longer, longer / ratio), dim=1).div(PATCH).round().long() * PATCH
    portrait = torch.rand(count, generator=generator) < 0.4
    return [(int(a), int(b)) if up else (int(b), int(a)) for (a, b), up in zip(sides, portrait)]


def mixed(name: str, batch: int) -> None:
    """The same images packed, and padded to the largest size; what is padding is computed too.

    Shapes are constant either way, so that both can be compiled: packed batches are filled up with a last image.
    """
    spread = [sizes(batch, seed) for seed in range(4)]
    images = [[torch.rand(3, *size) for size in shapes] for shapes in spread]
    counts = [sum(height * width for height, width in shapes) // PATCH**2 for shapes in spread]
    filling = [torch.zeros(3, PATCH, PATCH * (max(counts) - count + 1)) for count in counts]
    packed = [pack_images([*some, last], PATCH) for some, last in zip(images, filling)]
    longest = max(one.offsets.max_len for one in packed)
    for i, one in enumerate(packed):
        offsets = Offsets(one.offsets.starts, one.offsets.total, longest)
        packed[i] = dataclasses.replace(one, offsets=offsets).to("cuda")
    height, width = (max(side) for side in zip(*itertools.chain(*spread)))
    padded = [torch.zeros(batch, 3, height, width, device="cuda") for _ in images]
    for wide, some in zip(padded, images):
        for row, image in zip(wide, some):
            row[:, : image.shape[1], : image.shape[2]] = image
    filled = sum(counts) * PATCH**2 / (len(padded) * batch * height * width)
    labels = torch.randint(LABELS, (batch + 1,), device="cuda")
    width, heads = SHAPES[name]
    config = ViTConfig(width=width, heads=heads, feedforward=4 * width, labels=tuple(map(str, range(LABELS))))
    steps = {}
    for compiled in (False, True):
        how = "compiled" if compiled else "eager"
        steps[f"packed, {how}"] = training_step(ViT(config).to("cuda"), packed, labels, compiled)
        steps[f"padded, {how}"] = training_step(ViT(config).to("cuda"), padded, labels[:-1], compiled)
    for way, time_ in seconds(steps).items():
        what = f"ViT-{name}/16, mixed sizes, {filled:.0%} of the padded pixels real, training"
        print(f"| {what} | {way} | {batch / time_:,.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--only", nargs="+", metavar="ENTRANT", default=[])
    parser.add_argument("--batch", type=int, default=512)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    print("| what | entrant | images/s |\n| --- | --- | ---: |")
    for name, what in itertools.product(options.models, options.what):
        if what == "mixed":
            mixed(name, options.batch // 2)
        else:
            one_size(name, options.batch, what, options.only)


if __name__ == "__main__":
    main()
