"""`regard bench scores`: models with each of the six scores, and without attention, trained on the same data."""

import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from regard.attention.scores import SCORES
from regard.data.text.readers import PHRASEBOOK
from regard.devices import Device
from regard.errors import RegardError
from regard.evaluation.text_metrics import METRIC_FORMATS
from regard.files import write_atomically
from regard.models import ModelConfig, Seq2SeqConfig
from regard.training import DataConfig, Dataset, Recipe, read_dataset, run_recipe, suggest_recipe
from regard.training.run.run_folder import METRICS
from regard.training.run.run_log import read_metrics

Family = Literal["seq2seq", "transformer"]
NO_ATTENTION = "none"
STEPS = 600


@dataclass(frozen=True)
class ScoreMeasurement:
    """Results of one trained model."""

    score: str
    metric: float
    loss: float
    """validation loss per token, in nats"""
    parameters: int
    tokens_per_second: float
    seconds: float
    """duration of the run, including validation"""


@dataclass(frozen=True)
class ScoreReport:
    """Results of all models of a comparison.

    >>> print(ScoreReport("seq2seq", "BLEU", 9, [ScoreMeasurement("dot", 51.25, 0.5, 120_000, 8200.0, 31.0)]))
    seq2seq, 9 steps each
    <BLANKLINE>
    | score | BLEU | loss | parameters | tokens/s | seconds |
    | --- | ---: | ---: | ---: | ---: | ---: |
    | dot | 51.2 | 0.500 | 120,000 | 8,200 | 31.0 |
    """

    family: str
    metric: str
    steps: int
    rows: Sequence[ScoreMeasurement]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.family}, {self.steps:,} steps each"
        yield ""
        yield f"| score | {self.metric} | loss | parameters | tokens/s | seconds |"
        yield "| --- | ---: | ---: | ---: | ---: | ---: |"
        for row in self.rows:
            values = f"{row.metric:.1f} | {row.loss:.3f} | {row.parameters:,} | {row.tokens_per_second:,.0f}"
            yield f"| {row.score} | {values} | {row.seconds:.1f} |"

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        write_atomically(Path(path), (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode())


def bench_scores(
    device: Device = "auto",
    *,
    data: Sequence[str] = (),
    family: Family = "seq2seq",
    steps: int = STEPS,
    scores: Sequence[str] = (),
    seed: int = 1,
    on_row: Callable[[ScoreMeasurement], None] | None = None,
) -> ScoreReport:
    """Train one model per score on sentence pairs (default: the phrasebook) with otherwise equal settings.

    In a Transformer all three attentions use the score. A recurrent model is also trained without attention. The metric
    is chosen from the data. `on_row` is called after each model.

    >>> report = bench_scores("cpu", steps=1, scores=("dot", "none"))  # doctest: +SKIP
    >>> [row.score for row in report.rows]  # doctest: +SKIP
    ['dot', 'none']
    """
    if family not in get_args(Family):
        raise RegardError(f"family must be seq2seq or transformer (got {family!r}).", "Choose one of them.")
    known = (*SCORES, NO_ATTENTION) if family == "seq2seq" else tuple(SCORES)
    for name in scores:
        if name not in known:
            raise RegardError(
                f"No score of the family {family} is called {name!r}.", f"Choose from: {', '.join(known)}."
            )
    if steps < 1:
        raise RegardError(f"steps must be at least 1 (got {steps}).", f"The default is {STEPS}.")
    files = DataConfig(files=tuple(data) or (PHRASEBOOK,))
    dataset = read_dataset("translate", files)
    suggested = dataclasses.replace(suggest_recipe("translate", dataset), data=files)
    metric, rows = suggested.train.validate_by, []
    for name in scores or known:
        rows.append(_train_one(_make_recipe(suggested, family, name, steps, seed, device), dataset, name, metric))
        if on_row is not None:
            on_row(rows[-1])
    return ScoreReport(family, METRIC_FORMATS[metric][0], steps, rows)


def _make_recipe(suggested: Recipe, family: Family, score: str, steps: int, seed: int, device: Device) -> Recipe:
    """The suggested recipe with a model that uses this score, and a fixed number of steps."""
    config: Any = suggested.train
    changes: dict[str, Any] = dict(steps=steps, validate_every=steps, save_every=steps, seed=seed, device=device)
    changes |= dict(log_every=max(1, steps // 10), warmup=steps // 10, schedule="linear", patience=0)
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


def _train_one(recipe: Recipe, dataset: Dataset, score: str, metric: str) -> ScoreMeasurement:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="regard-") as folder:
        translator = run_recipe(recipe, folder, dataset=dataset, quiet=True)
        seconds = time.perf_counter() - start
        rates = [row["tokens_per_second"] for row in read_metrics(Path(folder) / METRICS) if "tokens_per_second" in row]
    validation = translator.training["validation"]
    return ScoreMeasurement(
        score,
        metric=validation[metric],
        loss=validation["nll"],
        parameters=sum(p.numel() for p in translator.model.parameters()),
        tokens_per_second=statistics.median(rates),
        seconds=seconds,
    )
