"""Translation quality beyond the trained length, for each kind of positional encoding.

    python benchmarks/lengths.py --out runs/lengths

Trains one small model per kind of positional encoding on the built-in phrasebook, on texts of one to three sentences
and at most `max_len` tokens, and translates texts of up to ten sentences. One table: chrF within the trained length and
beyond it. Models with learned positions reject longer texts.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation.text_metrics import text_scores
from regard.models import Seq2SeqConfig, TransformerConfig
from regard.training import Dataset, Recipe, TokenizerConfig, TrainConfig, run_recipe
from tools.phrasebook.generator import phrasebook_pairs

MAX_LEN = 32
SIZES = dict(width=64, heads=4, feedforward=128, encoder_layers=2, decoder_layers=2, dropout=0.0, max_len=MAX_LEN)
MODELS = {kind: TransformerConfig(**SIZES, positions=kind) for kind in ("learned", "sinusoidal", "rotary", "relative")}
MODELS |= {
    "none": TransformerConfig(**SIZES, positions="none"),
    "(seq2seq)": Seq2SeqConfig(width=64, dropout=0.0, max_len=MAX_LEN),
}
# Length of the longer side, in multiples of the trained length.
RANGES = {"up to 1×": (0.0, 1.0), "1× to 2×": (1.0, 2.0), "2× to 4×": (2.0, 4.0)}


def make_texts(part: str, count: int, sentences: int) -> list[tuple[str, str]]:
    """Texts with this number of sentences."""
    pairs = [(pair.source, pair.target) for pair in phrasebook_pairs(part, count * sentences)]
    groups = zip(*(pairs[i::sentences] for i in range(sentences)))
    return [(" ".join(s for s, _ in group), " ".join(t for _, t in group)) for group in groups]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=850)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    training = make_texts("train", 30_000, 1) + make_texts("train", 30_000, 2) + make_texts("train", 30_000, 3)
    dataset = Dataset(training, make_texts("val", 100, 1) + make_texts("val", 100, 2))
    tests = [pair for sentences in range(1, 11) for pair in make_texts("test", 60, sentences)]
    print("| positions | " + " | ".join(RANGES) + " |\n| --- |" + " ---: |" * len(RANGES), flush=True)
    for name in options.models:
        recipe = Recipe(
            tokenizer=TokenizerConfig(kind="word", vocab_size=4000, shared=False),
            model=MODELS[name],
            train=TrainConfig(
                **dict(steps=options.steps, validate_every=options.steps, patience=0),
                **dict(batch_tokens=2048, optimizer="muon", lr=1.1e-2, warmup=50, label_smoothing=0.0, device="cpu"),
            ),
        )
        translator = run_recipe(recipe, options.out / name.strip("()"), dataset=dataset, quiet=True)
        tokenizers = translator.tokenizers
        lengths = [1 + max(len(tokenizer.encode(text)) for tokenizer, text in zip(tokenizers, pair)) for pair in tests]
        cells = []
        for low, high in RANGES.values():
            pairs = [p for p, length in zip(tests, lengths) if low * MAX_LEN < length <= high * MAX_LEN]
            try:
                translations = translator.translate([source for source, _ in pairs], DecodeConfig("greedy"))
                scores = text_scores([best[0].text for best in translations], [target for _, target in pairs])
                cells.append(f"{scores.chrf:.1f}")
            except RegardError:
                cells.append("rejected")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
