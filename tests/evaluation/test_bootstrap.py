"""Confidence intervals and paired comparisons."""

import numpy as np
import pytest

from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation import evaluate, text_scores
from regard.evaluation.bootstrap import interval, share
from regard.evaluation.text_metrics import text_sums
from regard.models import GPT, GPTConfig, Transformer, TransformerConfig
from regard.pipelines import TextGenerator, Translator
from tests.conftest import number_pairs


def test_interval_of_a_share_is_that_of_the_normal_approximation():
    correct = np.arange(1000) < 300
    low, high = interval(share(correct).resampled)
    half = 1.96 * np.sqrt(0.3 * 0.7 / 1000) * 100
    assert (low, high) == pytest.approx((30 - half, 30 + half), abs=0.4)


def test_sums_over_examples_are_the_corpus_metrics():
    references = [f"the {word} cat sat on the mat" for word in ("red", "big", "old", "new")]
    outputs = [references[0], "the cat sat on a mat", "mat", references[3]]
    sums, signature = text_sums(outputs, references)
    scores = text_scores(outputs, references)
    assert signature == scores.signature
    assert {name: metric.value for name, metric in sums.items()} == {name: getattr(scores, name) for name in sums}
    assert sums["bleu"].margin > 0


def test_comparison_is_paired():
    """Of two models that are wrong on almost the same examples, the difference is certain; their intervals overlap."""
    first, second = np.arange(1000) < 700, np.arange(1000) < 680
    low, _ = interval(share(first).resampled)
    assert low < share(second).value
    low, high = interval(share(first).resampled - share(second).resampled)
    assert 0 < low < 2 < high < 4


def test_evaluate_compares_two_models():
    rows = number_pairs(40, seed=9)
    tokenizer = Tokenizer.train([text for row in rows for text in row], "word")
    sizes = {"width": 8, "heads": 2, "feedforward": 16, "encoder_layers": 1, "decoder_layers": 1}
    vocab = {"source_vocab": tokenizer.vocab_size, "target_vocab": tokenizer.vocab_size}
    translator = Translator(Transformer(TransformerConfig(**sizes, **vocab)).eval(), tokenizer, tokenizer)
    options = {"decode": DecodeConfig(method="greedy", engine="plain"), "quiet": True}
    alone = evaluate(translator, rows, **options)
    low, high = alone["intervals"]["chrf"]
    assert low <= alone["chrf"] <= high
    same = evaluate(translator, rows, compare=translator, **options)
    assert same["comparison"]["chrf"] == {"other": alone["chrf"], "difference": 0.0, "low": 0.0, "high": 0.0}
    assert "comparison" not in alone
    assert alone.keys() == same.keys() - {"comparison"}


def test_models_without_metrics_of_examples_are_not_compared(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three\n")
    tokenizer = Tokenizer.train(["one two three"], "char")
    generator = TextGenerator(GPT(GPTConfig(vocab=tokenizer.vocab_size, width=8, heads=2, layers=1)).eval(), tokenizer)
    with pytest.raises(RegardError, match="no metric whose difference has an interval"):
        evaluate(generator, text, compare=generator, quiet=True)
