"""Report of the batch at which a run failed: state/bad_batch.json."""

import json
import math
from pathlib import Path
from typing import Any

from regard.data.batching.pair_batches import Batch
from regard.errors import RegardError
from regard.files import write_atomically
from regard.layers.packed import Packed
from regard.training.run.checkpoint_store import STATE_FOLDER
from regard.training.run.loss_guard import SkippedUpdate

BAD_BATCH = Path(STATE_FOLDER) / "bad_batch.json"
# Examples in a report, and tokens or targets of each.
MAX_EXAMPLES, MAX_TOKENS = 1000, 40


def write_report(out: Path, update: SkippedUpdate, batches: list[Batch], tokenizers: tuple[Any, ...]) -> None:
    """Write step, position in the data, loss and examples of a failed update; texts are decoded."""
    report = {
        "step": update.step,
        "epoch": update.start.epoch,
        "batch": update.start.batch,
        "loss": update.loss if math.isfinite(update.loss) else str(update.loss),
        "batches": [describe_batch(batch, tokenizers) for batch in batches],
    }
    write_atomically(out / BAD_BATCH, (json.dumps(report, ensure_ascii=False, indent=1) + "\n").encode())


def repeated_failure_error(out: Path, reason: str, step: int) -> RegardError:
    """The error for a run that fails again after it returned to the checkpoint of a step."""
    return RegardError(
        f"{reason}, again after the run returned to the checkpoint of step {step}; {out / BAD_BATCH} describes the "
        "batch.",
        "Look for invalid examples in it, or train again with another --out and a smaller train.lr or a longer "
        "train.warmup.",
    )


def describe_batch(batch: Batch, tokenizers: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Size, lengths and first tokens of a batch.

    >>> from regard.layers.packed import pack
    >>> texts = pack([[5, 6], [7]])
    >>> describe_batch(Batch((texts,), texts.ids, 2, 3))["inputs"]
    [{'lengths': [2, 1], 'ids': [[5, 6], [7]]}]
    """
    inputs: list[dict[str, Any]] = []
    for index, x in enumerate(batch.inputs):
        if not isinstance(x, Packed):
            inputs.append({"shape": list(x.shape)})
            continue
        lengths = x.offsets.lengths[: batch.sentences].tolist()
        rows = [row.tolist() for row in x.ids[: sum(lengths)].split(lengths)][:MAX_EXAMPLES]
        inputs.append({"lengths": lengths, "ids": [row[:MAX_TOKENS] for row in rows]})
        if tokenizers:
            tokenizer = tokenizers[min(index, len(tokenizers) - 1)]
            inputs[-1]["texts"] = [tokenizer.decode(row) for row in rows]
    report = {"sequences": batch.sentences, "tokens": batch.tokens, "inputs": inputs}
    if len(batch.targets) and not any(isinstance(x, Packed) for x in batch.inputs):
        report["targets"] = batch.targets.flatten()[:MAX_EXAMPLES].tolist()
    return report
