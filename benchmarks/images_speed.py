"""Images per second of Vision Transformers at 224 pixels, against the installed peer libraries; and of mixed sizes.

    python benchmarks/images_speed.py --models tiny small --batch 512

Compilation takes longest; to fill its cache on disk in parallel, run with `--only timm` and so on beforehand.

All implementations are compiled, run under bf16 autocast, and are timed in alternation; results are medians of rounds.
A training step is forward, loss, backward and fused AdamW. Peers: timm, torchvision, transformers.
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
MODES = ("training", "inference", "mixed")
SHAPES = {"tiny": (192, 3), "small": (384, 6)}


def implementations(name: str) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Regard and the installed peers, as models from (B, 3, 224, 224) to (B, 1000)."""
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
    """A training step that cycles through the batches."""
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


def measure_seconds(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median seconds per step of each, measured in alternation after a warm-up."""
    for step in steps.values():
        for _ in range(3):
            step()
    timings: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
            timings[name].append((time.perf_counter() - start) / STEPS)
    return {name: statistics.median(times) for name, times in timings.items()}


def measure_one_size(name: str, batch: int, mode: str, only: list[str]) -> None:
    images = torch.rand(batch, 3, SIDE, SIDE, device="cuda")
    labels = torch.randint(LABELS, (batch,), device="cuda")
    steps = {}
    for implementation, make in implementations(name):
        if only and implementation not in only:
            continue
        model = make().to("cuda")
        is_training = mode == "training"
        steps[implementation] = training_step(model, [images], labels) if is_training else inference_step(model, images)
    for implementation, seconds in measure_seconds(steps).items():
        print(f"| ViT-{name}/16, {mode} | {implementation} | {batch / seconds:,.0f} |", flush=True)


def photo_sizes(count: int, seed: int) -> list[tuple[int, int]]:
    """Sizes like those of photos: longer side 96 to 384 pixels, portrait or landscape, multiples of PATCH."""
    generator = torch.Generator().manual_seed(seed)
    longer = (torch.exp(torch.randn(count, generator=generator) * 0.35) * 208).clamp(96, 384)
    ratio = torch.tensor([1.0, 4 / 3, 3 / 2, 16 / 9])[torch.randint(4, (count,), generator=generator)]
    sides = torch.stack((longer, longer / ratio), dim=1).div(PATCH).round().long() * PATCH
    portrait = torch.rand(count, generator=generator) < 0.4
    return [(int(a), int(b)) if is_portrait else (int(b), int(a)) for (a, b), is_portrait in zip(sides, portrait)]


def measure_mixed_sizes(name: str, batch: int) -> None:
    """The same images packed, and padded to the largest size, including the computation of padding.

    Shapes are constant in both cases, so that both can be compiled: packed batches end with a padding image.
    """
    batch_sizes = [photo_sizes(batch, seed) for seed in range(4)]
    images = [[torch.rand(3, *size) for size in sizes] for sizes in batch_sizes]
    counts = [sum(height * width for height, width in sizes) // PATCH**2 for sizes in batch_sizes]
    padding = [torch.zeros(3, PATCH, PATCH * (max(counts) - count + 1)) for count in counts]
    packed = [pack_images([*group, last], PATCH) for group, last in zip(images, padding)]
    max_len = max(group.offsets.max_len for group in packed)
    for i, group in enumerate(packed):
        offsets = Offsets(group.offsets.starts, group.offsets.total, max_len)
        packed[i] = dataclasses.replace(group, offsets=offsets).to("cuda")
    height, width = (max(side) for side in zip(*itertools.chain(*batch_sizes)))
    padded = [torch.zeros(batch, 3, height, width, device="cuda") for _ in images]
    for tensor, group in zip(padded, images):
        for row, image in zip(tensor, group):
            row[:, : image.shape[1], : image.shape[2]] = image
    real = sum(counts) * PATCH**2 / (len(padded) * batch * height * width)
    labels = torch.randint(LABELS, (batch + 1,), device="cuda")
    width, heads = SHAPES[name]
    config = ViTConfig(width=width, heads=heads, feedforward=4 * width, labels=tuple(map(str, range(LABELS))))
    steps = {}
    for compiled in (False, True):
        mode = "compiled" if compiled else "eager"
        steps[f"packed, {mode}"] = training_step(ViT(config).to("cuda"), packed, labels, compiled)
        steps[f"padded, {mode}"] = training_step(ViT(config).to("cuda"), padded, labels[:-1], compiled)
    for variant, seconds in measure_seconds(steps).items():
        case = f"ViT-{name}/16, mixed sizes, {real:.0%} of the padded pixels real, training"
        print(f"| {case} | {variant} | {batch / seconds:,.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--what", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--only", nargs="+", metavar="IMPLEMENTATION", default=[])
    parser.add_argument("--batch", type=int, default=512)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    print("| case | implementation | images/s |\n| --- | --- | ---: |")
    for name, mode in itertools.product(options.models, options.what):
        if mode == "mixed":
            measure_mixed_sizes(name, options.batch // 2)
        else:
            measure_one_size(name, options.batch, mode, options.only)


if __name__ == "__main__":
    main()
