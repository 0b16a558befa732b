"""`regard bench`: ours beside every peer that is installed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from regard.bench import (
    Report,
    ScoreReport,
    bench_attention,
    bench_decoding,
    bench_growth,
    bench_recording,
    bench_scores,
    bench_training,
)
from regard.bench.score_comparison import Family, ScoreRow
from regard.cli.common import note, parse
from regard.errors import RegardError
from regard.pipelines import Device

What = Literal["attention", "growth", "training", "decoding", "recording", "scores"]
BENCHES: dict[str, Callable[..., Report | ScoreReport]] = {
    "attention": bench_attention,
    "growth": bench_growth,
    "training": bench_training,
    "decoding": bench_decoding,
    "recording": bench_recording,
    "scores": bench_scores,
}
TAKES: dict[str, tuple[str, ...]] = {
    "attention": ("lengths", "scores", "masks", "compiled"),
    "growth": ("lengths", "scores", "compiled"),
    "training": ("compiled",),
    "decoding": (),
    "recording": ("lengths",),
    "scores": ("scores", "data", "steps", "family"),
}


@dataclass(frozen=True)
class Options:
    """Benchmark this machine, and Regard against every peer library that is installed: medians, in one table.

    attention: every score and mask, forward, and forward and backward, and the overhead of a call.
    growth: time and memory of every score as sequences grow, to where each way to compute it runs out.
    training: tokens a second of whole steps, as by default, beside other libraries' models of the same shape.
    decoding: sentences a second, greedily and with a beam, beside transformers and CTranslate2.
    recording: what it costs to look at the weights of a language model, beside transformers.
    scores: a model trained with each of the six scores, and one without attention, on the same sentence pairs.
    """

    what: Annotated[What, tyro.conf.Positional]
    device: Device = "auto"
    lengths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N")] = ()
    """lengths of sequences; chosen for the device when not given"""
    scores: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SCORE")] = ()
    """only these scores"""
    masks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MASK")] = ()
    """only these masks: none, causal, padding, causal+padding"""
    rounds: int | None = None
    """how many turns each entrant has, of which the median counts"""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE")] = ()
    """scores: files of sentence pairs; the built-in phrasebook when not given"""
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """scores: training steps of each model"""
    family: Family | None = None
    """scores: family of the models; seq2seq when not given"""
    compiled: bool = True
    """without the peers that torch.compile makes, which take seconds each"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """write the rows here too"""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """draw them here"""


def run(argv: list[str]) -> int:
    options = parse(Options, "bench", argv)
    for path, forms in ((options.out, (".json",)), (options.plot, (".png", ".svg"))):
        if path is not None and path.suffix not in forms:  # said before the minute of measuring, not after it
            raise RegardError(f"{path}: not a name for what is to be written.", f"End it in {' or '.join(forms)}.")
    if options.rounds is not None and options.rounds < 1:
        raise RegardError(f"{options.rounds} rounds measure nothing.", "Give --rounds 1 or more.")
    for name in ("lengths", "scores", "masks", "data", "steps", "family", "rounds", "plot"):
        takes = (*TAKES[options.what], *(() if options.what == "scores" else ("rounds", "plot")))
        if getattr(options, name) not in (None, ()) and name not in takes:
            raise RegardError(f"bench {options.what} has no --{name}.", "Leave it out.")
    report = _report(options)
    print(report)
    if options.out is not None:
        report.save(options.out)
    if options.plot is not None and isinstance(report, Report):
        report.plot(options.plot)
    return 0


def _report(options: Options) -> Report | ScoreReport:
    function, taken = BENCHES[options.what], {name: getattr(options, name) for name in TAKES[options.what]}
    if options.what == "scores":
        taken = {name: value for name, value in taken.items() if value is not None} | {"on_row": _say}
    if options.rounds is not None:
        taken["rounds"] = options.rounds
    return function(options.device, **taken)


def _say(row: ScoreRow) -> None:
    note(f"{row.score}: {row.seconds:.0f} s")
