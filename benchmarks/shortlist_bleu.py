"""Effect of a vocabulary shortlist on BLEU and speed.

    python benchmarks/shortlist_bleu.py MODEL --train train.en train.fr --input test.en --reference test.fr

Learns a shortlist from the training data (two parallel files, TSV, CSV or JSONL) with each --per-token and --frequent,
and translates the input with and without it, in turn, on the CPU. Options of the search: --beam, --precision. Prints a
Markdown table: BLEU, sentences per second (best of --repeats runs), share of the reference tokens that the lists
contain, and the mean size of the lists. The model folder is not changed.
"""

import argparse
import dataclasses
import time

from regard.data.text.readers import read_lines, read_pairs
from regard.decode import DecodeConfig
from regard.evaluation import text_scores
from regard.pipelines import Translator, load


def measure(
    translator: Translator, lines: list[str], references: list[str], config: DecodeConfig
) -> tuple[float, float]:
    """BLEU, and sentences per second."""
    start = time.perf_counter()
    texts = [n_best[0].text for n_best in translator.translate(lines, config, truncate=True)]
    rate = len(lines) / (time.perf_counter() - start)
    return text_scores(texts, references).bleu, rate


def list_sizes(translator: Translator, lines: list[str], references: list[str]) -> tuple[float, float]:
    """Share of the reference tokens in the lists of their sentences, and mean size of the lists."""
    assert translator.shortlist is not None
    found = total = size = 0
    for line, reference in zip(lines, references, strict=True):
        source = translator.encode_source(line, truncate=True)
        allowed = set(translator.shortlist.allowed_tokens(source, translator.special).tolist())
        target = translator.target_tokenizer.encode(reference)
        found, total, size = found + sum(token in allowed for token in target), total + len(target), size + len(allowed)
    return found / total, size / len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--input", required=True)
    parser.add_argument("--reference", required=True)
    parser.add_argument("--per-token", type=int, nargs="+", default=[20, 50, 100])
    parser.add_argument("--frequent", type=int, default=100)
    parser.add_argument("--beam", type=int, default=5, help="1: greedy")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    translator = load(options.model, "cpu", expect=Translator)
    lines, references = list(read_lines(options.input)), list(read_lines(options.reference))
    pairs = read_pairs(options.train)
    search = {"method": "greedy"} if options.beam == 1 else {"method": "beam", "beam": options.beam}
    config = DecodeConfig(**search, precision=options.precision)
    settings: list[tuple[str, Translator, DecodeConfig]] = [("no shortlist", translator, config)]
    for per_token in options.per_token:
        start = time.perf_counter()
        restricted = dataclasses.replace(translator)
        restricted.learn_shortlist(pairs, per_token=per_token, frequent=options.frequent)
        print(f"Learned {per_token} + {options.frequent} tokens in {time.perf_counter() - start:.1f} s.", flush=True)
        name = f"{per_token} per token, {options.frequent} frequent"
        settings.append((name, restricted, dataclasses.replace(config, shortlist=True)))

    rates, bleus = [0.0] * len(settings), [0.0] * len(settings)
    for _ in range(options.repeats):
        for i, (_, one, decode) in enumerate(settings):
            bleus[i], rate = measure(one, lines, references, decode)
            rates[i] = max(rates[i], rate)
    print("\n| shortlist | BLEU | sentences/s | speed | reference tokens in the lists | tokens per list |")
    print("| --- | --- | --- | --- | --- | --- |")
    for i, (name, one, decode) in enumerate(settings):
        if decode.shortlist:
            share, size = list_sizes(one, lines, references)
        else:
            share, size = 1.0, translator.model.config.target_vocab
        print(f"| {name} | {bleus[i]:.2f} | {rates[i]:.1f} | {rates[i] / rates[0]:.2f}× | {share:.2%} | {size:,.0f} |")


if __name__ == "__main__":
    main()
