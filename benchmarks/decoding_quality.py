"""Quality of decoding in each precision: BLEU, and where outputs differ from those of the plain search in float32.

    python benchmarks/decoding_quality.py MODEL --input test.en --reference test.fr --beam 5 --device cuda

Prints a Markdown table with one row per precision that the device supports. "largest gap" is the largest difference of
competing scores among the sentences that differ: in the plain search, the log-probability of the last hypothesis that
stayed in the beam minus that of the hypothesis that the other search preferred, at the step where it was pruned; or the
difference of final scores if it was not pruned. A gap of rounding errors means that both outputs were equally good.
"""

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from gpu_common import table

from regard.data.text.readers import read_lines
from regard.decode import DecodeConfig, SearchHistory
from regard.evaluation import text_scores
from regard.pipelines import Translation, Translator, load

PRECISIONS = {"cpu": ("int8",), "cuda": ("bfloat16", "float16", "float8"), "mps": ("float16",)}
HEADER = ["search", "BLEU", "change", "sentences that differ", "largest gap", "lines/s"]


class Search(NamedTuple):
    """A row of the table."""

    name: str
    engine: str
    precision: str


def searches(device: str) -> list[Search]:
    """The plain search in float32, which is the reference, and the engine in each precision."""
    engine = [Search(f"engine, {precision}", "auto", precision) for precision in ("float32", *PRECISIONS[device])]
    return [Search("plain, float32", "plain", "float32"), *engine]


def competing_gap(history: SearchHistory, ids: Sequence[int], best_score: float) -> float | None:
    """How much worse the output `ids` was in a recorded search when it was pruned; None if it was not searched."""
    beam = 0
    for step, token in zip(history.steps, [*ids, history.eos]):
        live = [step.logprobs[i] for i, status in enumerate(step.statuses) if status == "live"]
        pairs = list(zip(step.parents, step.tokens))
        if (beam, token) not in pairs:  # below all recorded candidates
            return (min(live) if live else step.logprobs[0]) - step.logprobs[-1]
        index = pairs.index((beam, token))
        if step.statuses[index] == "finished":
            return best_score - step.scores[index]
        if step.statuses[index] == "pruned":
            return (min(live) if live else step.logprobs[0]) - step.logprobs[index]
        beam = step.statuses[:index].count("live")
    return None


def largest_gap(
    translator: Translator, lines: Sequence[str], config: DecodeConfig, outputs: dict[int, Translation]
) -> float | None:
    """The largest gap of the outputs, by index of the line, which differ from those of the search with `config`."""
    if not outputs:
        return None
    recorded = translator.translate([lines[i] for i in outputs], config, history=True)
    gaps = []
    for (best, *_), other in zip(recorded, outputs.values()):
        assert best.history is not None
        gap = competing_gap(best.history, other.hypothesis.ids, best.score)
        gaps.append(abs(best.score - other.score) if gap is None else gap)
    return max(gaps)


def compare_searches(
    translator: Translator, lines: Sequence[str], references: Sequence[str], method: str, beam: int
) -> str:
    """Translate the lines with each search; returns the table."""
    plain: list[Translation] = []
    plain_config = DecodeConfig()
    rows: list[list[str]] = []
    bleu = 0.0
    for search in searches(translator.device.type):
        config = DecodeConfig(method, beam, engine=search.engine, precision=search.precision)  # type: ignore[arg-type]
        try:
            translator.translate(lines[:2], config)  # compilation and quantization are not measured
            start = time.perf_counter()
            outputs = [best for best, *_ in translator.translate(lines, config)]
            seconds = time.perf_counter() - start
        except Exception as error:  # a precision that this machine does not support is a row of the table
            rows.append([search.name, str(error).splitlines()[0], *[""] * (len(HEADER) - 2)])
            continue
        score = text_scores([output.text for output in outputs], references).bleu
        if not plain:
            plain, bleu, plain_config = outputs, score, config
        different = {i: o for i, (o, p) in enumerate(zip(outputs, plain)) if o.hypothesis.ids != p.hypothesis.ids}
        gap = largest_gap(translator, lines, plain_config, different)
        rate = f"{len(lines) / seconds:,.0f}"
        gap_cell = "" if gap is None else f"{gap:.1e}"
        rows.append([search.name, f"{score:.2f}", f"{score - bleu:+.2f}", str(len(different)), gap_cell, rate])
        print("; ".join(rows[-1]), flush=True)
    return table(HEADER, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a translation model")
    parser.add_argument("--input", required=True, help="source lines, plain or compressed")
    parser.add_argument("--reference", required=True, help="reference translations")
    parser.add_argument("--beam", type=int, default=5, help="beam width; 1: greedy decoding")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    lines, references = read_lines(options.input), read_lines(options.reference)
    if len(lines) != len(references):
        parser.error(f"{options.input} has {len(lines)} lines, {options.reference} has {len(references)}")
    translator = load(options.model, options.device, expect=Translator)
    translator.model.to(torch.float32)
    method = "beam" if options.beam > 1 else "greedy"
    print(f"{len(lines)} sentences, {method} {options.beam}, {translator.device}, torch {torch.__version__}\n")
    print(compare_searches(translator, lines, references, method, options.beam))


if __name__ == "__main__":
    main()
