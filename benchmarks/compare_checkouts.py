"""Training speed of two checkouts on one GPU, in alternating rounds.

    python benchmarks/compare_checkouts.py ../before ../after --rounds 3

Models: the base translator with post-norm and pre-norm, the character model, ViT-Ti with drop path. A step is forward
(bf16 autocast, blocks compiled), backward and fused Adam, captured in a CUDA graph; the base translator also eagerly,
and while decoding. Printed for each: milliseconds of both checkouts (the median of the rounds), their ratio, kernels
per step. Only `regard.models` and `regard.layers` are imported, so that checkouts may differ in everything else.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

BLOCKS = ("Embedding", "EncoderBlock", "DecoderBlock")


def measure_all(tiny: bool) -> dict[str, tuple[float, int]]:
    """Milliseconds and kernels per step of each model, in the checkout on PYTHONPATH."""
    import torch

    from regard.layers.packed import pack
    from regard.models import TransformerConfig, ViTConfig, make_model
    from regard.models.gpt import gpt_small

    device = "cuda" if torch.cuda.is_available() else "cpu"
    count, length, width, layers, vocab = (4, 8, 32, 1, 50) if tiny else (914, 28, 512, 6, 32_000)

    def texts(count: int, length: int, vocab: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        return pack(torch.randint(4, vocab, (count, length), generator=generator).tolist()).to(device)

    def training_step(config, inputs, compiled: bool) -> Callable[[], object]:
        torch.manual_seed(0)
        model = make_model(config).to(device).train()
        optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=True, capturable=device == "cuda")
        for module in model.modules():
            if compiled and type(module).__name__ in BLOCKS:
                # "first": the name of forward_first in older checkouts
                for name in {"forward", "first", "forward_first"} & set(dir(module)):
                    setattr(module, name, torch.compile(getattr(module, name)))

        def step() -> None:
            with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False):
                features = model.features(*inputs)
            features.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return capture(step) if compiled and device == "cuda" else step

    def capture(step: Callable[[], object]) -> Callable[[], object]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def decoding_step(config) -> Callable[[], object]:
        model = make_model(config).to(device).eval()
        source, last = texts(8, 10, config.source_vocab, 3), torch.full((8, 4), 5, device=device)

        @torch.no_grad()
        def decode() -> None:
            state = model.start(source)
            state = model.reorder(state, torch.arange(8, device=device)[:, None].expand(8, 4))
            for _ in range(10):
                _, state = model.step(state, last)

        return decode

    def milliseconds(step: Callable[[], object]) -> float:
        for _ in range(3):
            step()
        times = []
        for _ in range(3 if tiny else 30):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if device == "cuda" else (None, None)
            if begin is None or end is None:
                return 0.0
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)

    def count_kernels(step: Callable[[], object]) -> int:
        with torch.profiler.profile() as profile:
            step()
            if device == "cuda":
                torch.cuda.synchronize()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())

    shape = dict(width=width, heads=width // 16 if tiny else 8, feedforward=4 * width, dropout=0.1, max_len=128)
    shape |= dict(encoder_layers=layers, decoder_layers=layers, shared_vocab=True, source_vocab=vocab)
    pairs = texts(count, length, vocab, 1), texts(count, length, vocab, 2)
    characters = texts(4, 16, 65, 1) if tiny else texts(64, 256, 65, 1)
    images = torch.rand(2 if tiny else 256, 3, 224, 224, device=device)
    base = {norm: TransformerConfig(**shape, target_vocab=vocab, norm=norm) for norm in ("post", "pre")}
    vit = ViTConfig(layers=layers if tiny else 12, drop_path=0.1, labels=("a", "b"))
    steps: dict[str, Callable[[], Callable[[], object]]] = {
        "base, post-norm": lambda: training_step(base["post"], pairs, True),
        "base, pre-norm": lambda: training_step(base["pre"], pairs, True),
        "base, post-norm, eager": lambda: training_step(base["post"], pairs, False),
        "base, pre-norm, eager": lambda: training_step(base["pre"], pairs, False),
        "characters": lambda: training_step(gpt_small(vocab=65, max_len=256), (characters,), True),
        "ViT-Ti, drop path": lambda: training_step(vit, (images,), True),
        "base, pre-norm, 10 tokens decoded": lambda: decoding_step(base["pre"]),
    }
    results = {}
    for name, make in steps.items():
        step = make()
        results[name] = milliseconds(step), count_kernels(step)
        del step
        torch._dynamo.reset()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="folders of two checkouts: before, after")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the script")
    options = parser.parse_args()
    if not options.checkouts:
        print(json.dumps(measure_all(options.tiny)))
        return
    results: dict[Path, list[dict]] = {folder: [] for folder in options.checkouts}
    for round_index in range(options.rounds):
        order = options.checkouts if round_index % 2 == 0 else options.checkouts[::-1]
        for folder in order:
            environment = os.environ | {"PYTHONPATH": str(folder.resolve())}
            command = [sys.executable, str(Path(__file__).resolve()), *(["--tiny"] if options.tiny else [])]
            process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            results[folder].append(json.loads(process.stdout.splitlines()[-1]))
    before, after = (results[folder] for folder in options.checkouts)
    print(f"{'step':36} {'before ms':>10} {'after ms':>10} {'ratio':>7} {'kernels':>13}")
    for name in before[0]:
        first, second = (statistics.median(result[name][0] for result in rounds) for rounds in (before, after))
        ratio = second / first if first else float("nan")
        print(f"{name:36} {first:10.3f} {second:10.3f} {ratio:7.3f} {before[0][name][1]:6} {after[0][name][1]:6}")


if __name__ == "__main__":
    main()
