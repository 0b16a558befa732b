"""Speed of two checkouts, in alternating processes: decoding, training and imported models.

    python benchmarks/compare_checkouts.py ../before ../after [--only "translator"] [--rounds 10] [--processes 2]

A round runs every workload in a new process per checkout, in turns; a process runs on one core with one thread, and its
CPU time is measured, which other processes disturb less. One more round before the others fills the caches of compiled
kernels. Printed for each workload: the median milliseconds of both checkouts, and the median ratio of the rounds with
its 95% interval (bootstrap). A workload has failed if the interval lies wholly above 1.03; then the exit status is 1.

With `--processes 2`, 256 lines are decoded by that many processes instead, on all cores, and the time of the clock is
measured once they have started.

With a GPU, larger models are measured instead, in time and kernels per step: training (forward in bf16 autocast with
compiled blocks, backward and fused Adam, captured in a CUDA graph) and decoding.

Checkouts may differ in everything but the public names used here. Weights are random, so all outputs have one length.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ALLOWED_RATIO = 1.03
WORDS = [f"w{i}" for i in range(5, 2000)]
Step = Callable[[], Any]
"""computes once what is measured"""
# Classes of transformers, with their configs apart from ids.
_SIZES = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512)
IMPORTED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": dict(model_type="llama", num_key_value_heads=2, **_SIZES),
    "Gemma2ForCausalLM": dict(model_type="gemma2", num_key_value_heads=2, head_dim=64, sliding_window=16, **_SIZES),
    "T5ForConditionalGeneration": dict(
        **dict(model_type="t5", d_model=256, d_kv=64, d_ff=512, num_layers=4, num_decoder_layers=4, num_heads=4),
        **dict(feed_forward_proj="gated-gelu", decoder_start_token_id=0),
    ),
    "ModernBertForMaskedLM": dict(
        model_type="modernbert", local_attention=16, cls_token_id=2, sep_token_id=3, **_SIZES
    ),
}


LINES = [" ".join(random.Random(i).choices(WORDS, k=8 + i % 9)) for i in range(256)]
# Seconds until the processes that share the work run.
START_SECONDS = 4.0


def decoding(make_pipeline: Callable[[], Any], count: int, method: str) -> Callable[[], Step]:
    """Outputs of 20 tokens."""
    from regard import DecodeConfig

    def make() -> Step:
        pipeline = make_pipeline()
        run = pipeline.translate if hasattr(pipeline, "translate") else pipeline.generate
        config = DecodeConfig(method, min_len=20, max_len=20, max_extra=20)  # type: ignore[arg-type]
        return lambda: run(LINES[:count], config)

    return make


def cpu_workloads(imported: Path, processes: int) -> dict[str, Callable[[], Step]]:
    """Functions that make the steps of each workload, by its name."""
    from regard import train
    from regard.data import Tokenizer
    from regard.interop import import_huggingface
    from regard.models import GPTConfig, Seq2SeqConfig, TransformerConfig, make_model
    from regard.pipelines import TextEncoder, TextGenerator, Translator

    lines = LINES[:32]
    tokenizer = Tokenizer.train([" ".join(WORDS)], "word", vocab_size=len(WORDS) + 4)
    translation: dict[str, Any] = dict(source_vocab=len(WORDS) + 4, target_vocab=len(WORDS) + 4, shared_vocab=True)

    def scoring(make_pipeline: Callable[[], Any]) -> Callable[[], Step]:
        def make() -> Step:
            pipeline = make_pipeline()
            if isinstance(pipeline, TextEncoder):
                return lambda: pipeline.embed(lines)
            inputs: Any = lines if isinstance(pipeline, TextGenerator) else [*zip(lines, lines[::-1])]
            return lambda: pipeline.score(inputs)

        return make

    def training(task: str, **model: Any) -> Callable[[], Step]:
        """A whole run of 30 updates."""

        def step() -> None:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "text.tsv"
                rows = [f"{line} {i}\t{line}" if task == "translate" else line for i in range(32) for line in lines]
                file.write_text("\n".join(rows))
                settings = dict(steps=30, batch_tokens=256, validate_every=30, workers=1, device="cpu")
                out, tokenizer = Path(folder) / "model", {"kind": "word"}
                train(file, out, task=task, model=model, train=settings, tokenizer=tokenizer, quiet=True)

        return lambda: step

    def translator(config: Any) -> Callable[[], Any]:
        return lambda: Translator(make_model(config).eval(), tokenizer, tokenizer)

    small = translator(TransformerConfig(**translation))
    recurrent = translator(Seq2SeqConfig(**translation))
    language = lambda: TextGenerator(make_model(GPTConfig(vocab=len(WORDS) + 4)).eval(), tokenizer)  # noqa: E731
    if processes > 1:
        return {
            "translator, greedy, 256 lines": decoding(small, 256, "greedy"),
            "translator, beam 5, 256 lines": decoding(small, 256, "beam"),
            "recurrent translator, greedy, 256 lines": decoding(recurrent, 256, "greedy"),
        }
    workloads = {
        "translator, greedy, 32 lines": decoding(small, 32, "greedy"),
        "translator, beam 5, 8 lines": decoding(small, 8, "beam"),
        "translator, beam 5, 1 line": decoding(small, 1, "beam"),
        "recurrent translator, greedy, 32 lines": decoding(recurrent, 32, "greedy"),
        "recurrent translator, beam 5, 8 lines": decoding(recurrent, 8, "beam"),
        "language model, greedy, 32 lines": decoding(language, 32, "greedy"),
        "language model, greedy, 1 line": decoding(language, 1, "greedy"),
        "training a translator, 30 updates": training("translate", width=128, encoder_layers=2, decoder_layers=2),
        "training a language model, 30 updates": training("language", width=128, layers=4),
    }
    for name in IMPORTED:
        load = lambda name=name: import_huggingface(imported / name)  # noqa: E731
        workloads[f"{name}, forward, 32 texts"] = scoring(load)
        if not name.endswith("MaskedLM"):
            workloads[f"{name}, greedy, 8 texts"] = decoding(load, 8, "greedy")
    return workloads


def gpu_workloads() -> dict[str, Callable[[], Step]]:
    import torch

    from regard.data import Tokenizer
    from regard.layers.packed import pack
    from regard.models import TransformerConfig, ViTConfig, make_model

    try:
        from regard.layers.fusion import fuse_residuals
    except ImportError:  # a checkout whose blocks call the kernel themselves
        fuse_residuals = lambda model: model  # noqa: E731
    from regard.models.gpt import gpt_small
    from regard.pipelines import Translator

    def texts(count: int, length: int, vocab: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return pack(torch.randint(4, vocab, (count, length), generator=generator).tolist()).to("cuda")

    def training(config: Any, inputs: Callable[[], tuple], compiled: bool = True) -> Callable[[], Step]:
        def make() -> Step:
            torch.manual_seed(0)
            model, batch = fuse_residuals(make_model(config).cuda().train()), inputs()
            optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=True, capturable=True)
            names = {"Embedding", "TransformerBlock", "EncoderBlock", "DecoderBlock"}
            for module in model.modules():
                if compiled and names & {one.__name__ for one in type(module).__mro__}:
                    for name in {"forward", "forward_first"} & set(dir(module)):
                        setattr(module, name, torch.compile(getattr(module, name)))

            def step() -> None:
                with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
                    features = model.features(*batch)
                features.float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

            return capture(step) if compiled else step

        return make

    def capture(step: Step) -> Step:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    vocab = 32_000
    shape = dict(width=512, heads=8, feedforward=2048, dropout=0.1, max_len=128, encoder_layers=6, decoder_layers=6)
    shape |= dict(shared_vocab=True, source_vocab=vocab, target_vocab=vocab)
    post, pre = (TransformerConfig(**shape, norm=norm) for norm in ("post", "pre"))  # type: ignore[arg-type]
    pairs = lambda: (texts(914, 28, vocab, 1), texts(914, 28, vocab, 2))  # noqa: E731
    tokenizer = Tokenizer.train([" ".join(WORDS)], "word")
    images = lambda: (torch.rand(256, 3, 224, 224, device="cuda"),)  # noqa: E731
    return {
        "base, post-norm": training(post, pairs),
        "base, pre-norm": training(pre, pairs),
        "base, post-norm, eager": training(post, pairs, compiled=False),
        "base, pre-norm, eager": training(pre, pairs, compiled=False),
        "characters": training(gpt_small(vocab=65, max_len=256), lambda: (texts(64, 256, 65, 1),)),
        "base, pre-norm, greedy, 32 lines": decoding(
            lambda: Translator(make_model(pre).cuda().eval(), tokenizer, tokenizer), 32, "greedy"
        ),
        "ViT-Ti, drop path": training(ViTConfig(layers=12, drop_path=0.1, labels=("a", "b")), images),
    }


def measure(imported: Path, only: str, processes: int) -> dict[str, tuple[float, int]]:
    """Milliseconds and kernels per step of the workloads, in the checkout on PYTHONPATH."""
    import torch

    import regard

    assert Path(regard.__file__).parents[1] == Path(os.environ["PYTHONPATH"]), "another package is measured"
    on_gpu = torch.cuda.is_available()
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    clock = time.perf_counter if on_gpu or processes > 1 else time.process_time
    torch.set_num_threads(processes)
    if not on_gpu and processes == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    results = {}
    for name, make in (gpu_workloads() if on_gpu else cpu_workloads(imported, processes)).items():
        if only in name:
            torch.manual_seed(0)
            step, begin = make(), time.perf_counter()
            step()
            while processes > 1 and time.perf_counter() < begin + START_SECONDS:
                step()
            times: list[float] = []
            begin = time.perf_counter()
            while len(times) < 30 and (not times or time.perf_counter() < begin + 2):
                synchronize()
                start = clock()
                step()
                synchronize()
                times.append(1000 * (clock() - start))
            results[name] = statistics.median(times), count_kernels(step) if on_gpu else 0
            torch._dynamo.reset()
    return results


def count_kernels(step: Step) -> int:
    import torch

    with torch.profiler.profile() as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def write_models(folder: Path) -> None:
    """Write the imported models: random weights of transformers, and a tokenizer of words."""
    import torch

    if torch.cuda.is_available():
        return
    import transformers

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.interop.model_comparison import randomize, write_tokenizer, write_translation_tokenizer

    ids = dict(vocab_size=2000, pad_token_id=0, bos_token_id=2, eos_token_id=3)
    for name, config in IMPORTED.items():
        torch.manual_seed(0)
        model = getattr(transformers, name)(transformers.AutoConfig.for_model(**ids, **config))
        randomize(model)
        model.save_pretrained(folder / name)
        if name.startswith("T5"):
            write_translation_tokenizer(folder / name, model.config, vocab=2000)
        else:
            write_tokenizer(folder / name, add_special_tokens=name.endswith("MaskedLM"), vocab=2000)


def interval(ratios: list[float]) -> tuple[float, float]:
    """95% interval of the median, by the bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return medians[250], medians[-251]


def run_round(checkout: Path, imported: Path, only: str, processes: int) -> dict[str, tuple[float, int]]:
    """The results of `measure` in a new process."""
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure", str(imported), "--only", only]
    command += ["--processes", str(processes)]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="folders of two checkouts: before, after")
    parser.add_argument("--only", default="", help="part of the names of the workloads to measure")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.only, options.processes)))
        return
    if len(options.checkouts) != 2:
        parser.error("Pass the folders of two checkouts.")
    results: list[list[dict[str, tuple[float, int]]]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        if options.processes == 1:
            write_models(Path(folder))
        for index in range(options.rounds + 1):
            for i in (0, 1) if index % 2 else (1, 0):
                result = run_round(options.checkouts[i], Path(folder), options.only, options.processes)
                if index:  # the first round fills caches
                    results[i].append(result)
    print(f"{'workload':42} {'before ms':>10} {'after ms':>10} {'ratio':>6}  {'95% interval':13} {'kernels':>13}")
    failed = False
    for name in results[0][0]:
        before, after = ([times[name][0] for times in rounds] for rounds in results)
        ratios = [y / x for x, y in zip(before, after)]
        low, high = interval(ratios)
        times = f"{statistics.median(before):10.2f} {statistics.median(after):10.2f} {statistics.median(ratios):6.3f}"
        kernels = " ".join(f"{rounds[-1][name][1]:6}" for rounds in results)
        print(f"{name:42} {times}  {low:.3f}–{high:.3f}   {kernels}{'  failed' if low > ALLOWED_RATIO else ''}")
        failed |= low > ALLOWED_RATIO
    sys.exit(failed)


if __name__ == "__main__":
    main()
