"""`regard scores`: the six scores compared on the same sentence pairs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from regard.cli.common import DeviceOption, Quiet, parse
from regard.cli.options import Arg
from regard.data.text.readers import PHRASEBOOK
from regard.training.score_comparison import STEPS, Family, scores


@dataclass(frozen=True)
class Options:
    """Train a model with each of the six scores, and one without attention, on the same data: regard scores

    Print a table: validation metric, loss, parameters and tokens per second. Write a model folder per score, the table
    (scores.json) and the loss curves (scores.png). The same command resumes an interrupted comparison.
    """

    data: Annotated[tuple[str, ...], Arg("FILE", default="the built-in phrasebook")] = (PHRASEBOOK,)
    """files of sentence pairs"""
    out: Annotated[Path, Arg("FOLDER")] = Path("scores")
    """output folder"""
    scores: Annotated[tuple[str, ...], Arg("SCORE", default="all")] = ()
    """scores to compare; none: without attention"""
    family: Family = "seq2seq"
    """model family; in a Transformer, all three attentions use the score"""
    steps: int = STEPS
    """training steps per model"""
    seed: int = 1
    """random seed of the training runs"""
    device: DeviceOption = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "scores", argv)
    print(scores(**vars(options)))
    return 0
