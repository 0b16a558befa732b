"""`regard bench`: ours beside every peer that is installed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from regard.bench import Report, bench_attention, bench_growth
from regard.cli.common import parse
from regard.errors import RegardError
from regard.folder import Device

What = Literal["attention", "growth"]


@dataclass(frozen=True)
class Options:
    """Measures this machine's ceilings, then Regard beside every peer that is installed, in turns: medians, one table.

    attention: every score and mask, forward, and forward and backward, and the overhead of a call.
    growth: time and memory of every score as sequences grow, to where each way to compute it runs out.
    """

    what: Annotated[What, tyro.conf.Positional]
    device: Device = "auto"
    lengths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N")] = ()
    """lengths of sequences; chosen for the device when not given"""
    scores: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SCORE")] = ()
    """only these scores"""
    masks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MASK")] = ()
    """only these masks: none, causal, padding, causal+padding"""
    rounds: int = 3
    """how many turns each entrant has; the median counts"""
    no_compile: bool = False
    """leave out the peers that torch.compile makes, which take seconds each"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """write the rows here too"""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """draw them here"""


def run(argv: list[str]) -> int:
    options = parse(Options, "bench", argv)
    for path, forms in ((options.out, (".json",)), (options.plot, (".png", ".svg"))):
        if path is not None and path.suffix not in forms:  # said before the minute of measuring, not after it
            raise RegardError(f"{path}: not a name for what is to be written.", f"End it in {' or '.join(forms)}.")
    if options.rounds < 1:
        raise RegardError(f"{options.rounds} rounds measure nothing.", "Give --rounds 1 or more.")
    report = _report(options)
    print(report)
    if options.out is not None:
        report.save(options.out)
    if options.plot is not None:
        report.plot(options.plot)
    return 0


def _report(options: Options) -> Report:
    device, lengths, scores, rounds = options.device, options.lengths, options.scores, options.rounds
    compiled = not options.no_compile
    match options.what:
        case "attention":
            return bench_attention(device, lengths, scores, options.masks, compiled=compiled, rounds=rounds)
        case "growth":
            return bench_growth(device, lengths, scores, compiled=compiled, rounds=rounds)
