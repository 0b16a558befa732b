"""The six scores compared: models that differ only in the score, trained on the same sentence pairs."""

import dataclasses
import io
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from regard.attention.scores import SCORES
from regard.data.text.readers import PHRASEBOOK
from regard.devices import Device
from regard.errors import RegardError
from regard.evaluation.text_metrics import METRIC_FORMATS
from regard.files import check_output_folder, write_atomically
from regard.models import ModelConfig, Seq2SeqConfig
from regard.ranges import Count, check_value
from regard.training.checkpoint import METRICS
from regard.training.log import read_metrics
from regard.training.recipe import DataConfig, Recipe
from regard.training.run import run_recipe
from regard.training.tasks import read_dataset, suggest_recipe

Family = Literal["seq2seq", "transformer"]
NO_ATTENTION = "none"
STEPS = 600


class ScoreResult(NamedTuple):
    """The result of one model, of its last validation."""

    score: str
    metric: float
    loss: float
    """validation loss per token, in nats"""
    parameters: int
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class ScoreTable:
    """The results of all models; printed as a Markdown table.

    >>> print(ScoreTable("seq2seq", "BLEU", 9, [ScoreResult("dot", 51.25, 0.5, 120_000, 8200.0)]))
    seq2seq, 9 steps each
    <BLANKLINE>
    | score | BLEU | loss | parameters | tokens/s |
    | --- | ---: | ---: | ---: | ---: |
    | dot | 51.2 | 0.500 | 120,000 | 8,200 |
    """

    family: str
    metric: str
    steps: int
    rows: Sequence[ScoreResult]

    def __str__(self) -> str:
        head = f"| score | {self.metric} | loss | parameters | tokens/s |\n| --- |{' ---: |' * 4}"
        rows = [
            f"| {row.score} | {row.metric:.1f} | {row.loss:.3f} | {row.parameters:,} | {row.tokens_per_second:,.0f} |"
            for row in self.rows
        ]
        return "\n".join([f"{self.family}, {self.steps:,} steps each", "", head, *rows])


def scores(
    data: str | Sequence[str] = PHRASEBOOK,
    out: str | Path = "scores",
    *,
    scores: Sequence[str] = (),
    family: Family = "seq2seq",
    steps: int = STEPS,
    seed: int = 1,
    device: Device = "auto",
    quiet: bool = False,
) -> ScoreTable:
    """Train one model per score on sentence pairs (default: the phrasebook) with otherwise equal settings.

    In a Transformer all three attentions use the score. A recurrent model is also trained without attention. The metric
    is chosen from the data. The folder `out` gets a model folder per score, the table as scores.json, and the loss
    curves as scores.png. The same call resumes an interrupted comparison.

    >>> table = scores("pairs.tsv", steps=1000, scores=("dot", "none"))  # doctest: +SKIP
    >>> [row.score for row in table.rows]  # doctest: +SKIP
    ['dot', 'none']
    """
    check_value(Family, family, "family")
    check_value(Count, steps, "steps")
    known = (*SCORES, NO_ATTENTION) if family == "seq2seq" else tuple(SCORES)
    for name in scores:
        if name not in known:
            raise RegardError(
                f"No score of the family {family} is called {name!r}.", f"Choose from: {', '.join(known)}."
            )
    files = DataConfig(files=(data,) if isinstance(data, str) else tuple(data))
    out = Path(out)
    check_output_folder(out, files.files)
    dataset = read_dataset("translate", files, quiet=quiet)
    suggested = dataclasses.replace(suggest_recipe("translate", dataset), data=files)
    metric, rows = suggested.train.validate_by, []
    for name in scores or [name for name in known if name != "concat_joint"]:  # which computes the same as concat
        recipe = _make_recipe(suggested, family, name, steps, seed, device)
        translator = run_recipe(recipe, out / name, dataset=dataset, quiet=True)
        validation, metrics = translator.training["validation"], read_metrics(out / name / METRICS)
        parameters = sum(p.numel() for p in translator.model.parameters())
        speed = statistics.median(line["tokens_per_second"] for line in metrics if "tokens_per_second" in line)
        rows.append(ScoreResult(name, validation[metric], validation["nll"], parameters, speed))
        if not quiet:
            print(f"{name}: {METRIC_FORMATS[metric][0]} {validation[metric]:.1f}", file=sys.stderr, flush=True)
    table = ScoreTable(family, METRIC_FORMATS[metric][0], steps, rows)
    content = dataclasses.asdict(table) | {"rows": [row._asdict() for row in rows]}
    write_atomically(out / "scores.json", (json.dumps(content, indent=1) + "\n").encode())
    _plot_losses({row.score: read_metrics(out / row.score / METRICS) for row in rows}, out / "scores.png")
    return table


def _make_recipe(suggested: Recipe, family: Family, score: str, steps: int, seed: int, device: Device) -> Recipe:
    """The suggested recipe with a model that uses this score, and a fixed number of steps."""
    config: Any = suggested.train
    changes: dict[str, Any] = dict(steps=steps, validate_every=steps, save_every=steps, seed=seed, device=device)
    changes |= dict(log_every=max(1, steps // 10), warmup=steps // 10, schedule="linear", patience=0, r_drop=0.0)
    return dataclasses.replace(
        suggested, model=_make_config(suggested.model, family, score), train=dataclasses.replace(config, **changes)
    )


def _make_config(sizes: Any, family: Family, score: str) -> ModelConfig:
    if family == "transformer":
        return dataclasses.replace(sizes, encoder_score=score, decoder_score=score, cross_score=score)
    common: dict[str, Any] = dict(width=sizes.width, dropout=sizes.dropout, max_len=sizes.max_len)
    if score == NO_ATTENTION:
        return Seq2SeqConfig(**common, attention="none")
    return Seq2SeqConfig(**common, score=score)  # type: ignore[arg-type]


def _plot_losses(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Plot the training loss of each score."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for score, metrics in runs.items():
        points = [(line["step"], line["nll"]) for line in metrics if line["kind"] == "train" and "nll" in line]
        axes.plot(*zip(*points), label=score)
    axes.set(xlabel="step", ylabel="training loss per token")
    axes.grid(alpha=0.3)
    axes.legend()
    plot = io.BytesIO()
    figure.savefig(plot, dpi=120)
    write_atomically(path, plot.getvalue())
