"""`regard bench`: benchmarks of Regard and of installed peer libraries."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from regard.bench import (
    BenchReport,
    ScoreReport,
    bench_attention,
    bench_decoding,
    bench_growth,
    bench_recording,
    bench_scores,
    bench_training,
)
from regard.bench.score_comparison import STEPS, Family, ScoreMeasurement
from regard.cli.common import DeviceOption, parse, print_note
from regard.errors import RegardError

Benchmark = Literal["attention", "growth", "training", "decoding", "recording", "scores"]
BENCHES: dict[str, Callable[..., BenchReport | ScoreReport]] = {
    "attention": bench_attention,
    "growth": bench_growth,
    "training": bench_training,
    "decoding": bench_decoding,
    "recording": bench_recording,
    "scores": bench_scores,
}
BENCH_OPTIONS: dict[str, tuple[str, ...]] = {
    "attention": ("lengths", "scores", "masks", "compiled"),
    "growth": ("lengths", "scores", "compiled"),
    "training": ("compiled",),
    "decoding": ("shapes", "compiled"),
    "recording": ("lengths",),
    "scores": ("scores", "data", "steps", "family"),
}


@dataclass(frozen=True)
class Options:
    """Benchmark Regard and installed peer libraries on this machine, and print a table of medians.

    attention: every score and mask, forward and backward, and the overhead per call.

    growth: time and memory of every score with increasing length, up to the limit of each implementation.

    training: tokens per second of full training steps, compared with models of the same shape in other libraries.

    decoding: tokens per second of greedy and beam search at several batch sizes, compared with transformers and
    CTranslate2 on the same weights.

    recording: cost of recording the attention weights of a language model, compared with transformers.

    scores: quality of models trained with each of the six scores and without attention, on the same sentence pairs.
    """

    benchmark: Annotated[Benchmark, tyro.conf.Positional]
    """benchmark to run"""
    device: DeviceOption = "auto"
    lengths: Annotated[
        tuple[int, ...], tyro.conf.arg(metavar="N", help_behavior_hint="(default: chosen for the device)")
    ] = ()
    """sequence lengths in tokens"""
    scores: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SCORE", help_behavior_hint="(default: all)")] = ()
    """scores to measure"""
    masks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MASK", help_behavior_hint="(default: all)")] = ()
    """masks to measure: none, causal, padding, causal+padding"""
    shapes: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="SHAPE", help_behavior_hint="(default: chosen for the device)")
    ] = ()
    """decoding: shapes to measure: small, base, gpt2"""
    rounds: Annotated[
        int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: depends on the benchmark)")
    ] = None
    """measurements per row, of which the median is reported"""
    data: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the built-in phrasebook)")
    ] = ()
    """scores: files of sentence pairs"""
    steps: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint=f"(default: {STEPS})")] = None
    """scores: training steps per model"""
    family: Annotated[Family | None, tyro.conf.arg(help_behavior_hint="(default: seq2seq)")] = None
    """scores: model family"""
    compiled: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = True
    """leave out torch.compile, which takes seconds per measurement"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json", help_behavior_hint="")] = None
    """output file of the measurements"""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png", help_behavior_hint="")] = None
    """output file of a plot, .png, .svg or .pdf"""


def run(argv: list[str]) -> int:
    options = parse(Options, "bench", argv)
    for path, forms in ((options.out, (".json",)), (options.plot, (".png", ".svg", ".pdf"))):
        if path is not None and path.suffix not in forms:  # checked before the measurements, which take minutes
            raise RegardError(f"{path}: expected the extension {' or '.join(forms)}.", "Change the file extension.")
    if options.rounds is not None and options.rounds < 1:
        raise RegardError(f"--rounds must be at least 1 (got {options.rounds}).", "Pass a positive number.")
    for name in ("lengths", "scores", "masks", "shapes", "data", "steps", "family", "rounds", "plot"):
        supported = (*BENCH_OPTIONS[options.benchmark], *(() if options.benchmark == "scores" else ("rounds", "plot")))
        if getattr(options, name) not in (None, ()) and name not in supported:
            raise RegardError(f"bench {options.benchmark} does not support --{name}.", "Leave it out.")
    report = _run_benchmark(options)
    print(report)
    if options.out is not None:
        report.save(options.out)
    if options.plot is not None and isinstance(report, BenchReport):
        report.plot(options.plot)
    return 0


def _run_benchmark(options: Options) -> BenchReport | ScoreReport:
    function = BENCHES[options.benchmark]
    arguments = {name: getattr(options, name) for name in BENCH_OPTIONS[options.benchmark]}
    if options.benchmark == "scores":
        arguments = {name: value for name, value in arguments.items() if value is not None} | {"on_row": _print_row}
    if options.rounds is not None:
        arguments["rounds"] = options.rounds
    return function(options.device, **arguments)


def _print_row(row: ScoreMeasurement) -> None:
    print_note(f"{row.score}: {row.seconds:.0f} s")
