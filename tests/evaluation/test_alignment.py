"""Word alignments from attention, compared with hand-computed ones and with gold alignments."""

import dataclasses

import numpy as np
import pytest

from regard.attention import record
from regard.data import Tokenizer
from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.evaluation import align, alignment_error_rate, attention_names, format_links
from regard.evaluation.alignment import _links, _pieces_in_words, best_layer, read_links, sharpest_layer
from regard.layers.packed import pack
from regard.models import Seq2SeqConfig, TransformerConfig, make_model
from regard.pipelines import Translator
from regard.viewer import look
from tests.conftest import number_links, number_pairs


@pytest.mark.parametrize(
    ("predicted", "gold", "rate"),
    [
        ([[(0, 0), (1, 1)]], [[(0, 0), (1, 1)]], 0.0),
        ([[(0, 0)]], [[(1, 1)]], 1.0),
        ([[(0, 0), (1, 1), (2, 1)], [(0, 0)]], [[(0, 0), (1, 2)], [(0, 0), (1, 1)]], 1 - 2 * 2 / (4 + 4)),
        ([[(0, 0)]], [[(0, 0), (0, 1), (0, 2)]], 1 - 2 * 1 / (1 + 3)),
        ([[(0, 0), (0, 0)]], [[(0, 0)]], 0.0),
        ([[]], [[]], 0.0),
    ],
)
def test_alignment_error_rate_matches_hand_computed_values(predicted, gold, rate):
    assert alignment_error_rate(predicted, gold) == pytest.approx(rate)


def test_different_numbers_of_alignments_and_gold_are_an_error():
    with pytest.raises(RegardError, match="2 alignments, but 1 gold"):
        alignment_error_rate([[], []], [[]])


def test_source_pieces_are_summed_and_target_pieces_averaged():
    # Source words: a (one piece), b (two pieces). Target words: x (two pieces), y (one piece).
    columns = np.array([[1, 0], [0, 1], [0, 1]], bool)
    rows = np.array([[1, 0], [1, 0], [0, 1]], bool)
    weights = np.array([[0.45, 0.30, 0.25], [0.50, 0.25, 0.20], [0.40, 0.30, 0.30]])
    # x attends to a with (0.45 + 0.50) / 2 and to b with (0.55 + 0.45) / 2; no single piece of b has more than a.
    assert _links(weights, rows, columns) == [(1, 0), (1, 1)]
    weights[1, 0] += 0.10
    assert _links(weights, rows, columns) == [(0, 0), (1, 1)]


def test_truncated_words_have_no_links():
    pieces = np.eye(3, dtype=bool)
    assert _links(np.eye(2), pieces, pieces) == [(0, 0), (1, 1)]


def test_pieces_are_assigned_to_words_by_character_offsets():
    tokenizer = Tokenizer.train(["ab cd"], "char")
    membership = _pieces_in_words(tokenizer, " ab  cd")
    assert membership.tolist() == [[True, False], [True, False], [False, False], [False, True], [False, True]]


@pytest.mark.parametrize("model", ["transformer", "seq2seq"])
def test_align_agrees_with_look(model, request):
    """In a batch as for single pairs, without <eos>; each word is one piece."""
    translator = request.getfixturevalue(model)
    pairs = number_pairs(20, seed=3)
    for layer in attention_names(translator, "cross"):
        expected = []
        for source, target in pairs:
            best = look(translator, source, target).maps[layer].head_weights()[:-1, :-1].argmax(1)
            expected.append(sorted((int(s), t) for t, s in enumerate(best)))
        assert align(translator, pairs, layer) == expected


def test_pieces_are_merged_into_words():
    pairs = number_pairs(8, seed=4)
    tokenizer = Tokenizer.train([side for pair in pairs for side in pair], "char")
    size = tokenizer.vocab_size
    config = TransformerConfig(width=16, heads=2, feedforward=16, source_vocab=size, target_vocab=size)
    translator = Translator(make_model(config).eval(), tokenizer, tokenizer)
    source, target = pairs[0]
    weights = look(translator, source, target).maps["decoder.0.cross"].head_weights()
    indices = [
        [i for i, _ in enumerate(text) if text[:i].count(" ") == w and text[i] != " "]
        for text in pairs[0]
        for w in range(len(text.split()))
    ]
    sources, targets = indices[: len(source.split())], indices[len(source.split()) :]
    table = [[np.mean([weights[t, s].sum() for t in word]) for s in sources] for word in targets]
    expected = sorted((int(np.argmax(row)), t) for t, row in enumerate(table))
    assert align(translator, pairs, "decoder.0.cross")[0] == expected


def test_trained_model_has_low_alignment_error(seq2seq):
    pairs = number_pairs(100, seed=5)
    assert alignment_error_rate(align(seq2seq, pairs), number_links(pairs)) < 0.1


def test_best_layer_has_the_lowest_error(transformer):
    pairs = number_pairs(60, seed=6)
    gold = number_links(pairs)
    rates = {
        layer: alignment_error_rate(align(transformer, pairs, layer), gold)
        for layer in attention_names(transformer, "cross")
    }
    assert len(set(rates.values())) == 2
    assert rates[best_layer(transformer, pairs, gold)] == min(rates.values())


def test_layer_without_gold_needs_no_text_for_a_single_layer(transformer, seq2seq):
    assert sharpest_layer(seq2seq, []) == "decoder.attention"
    assert sharpest_layer(transformer, [("", "")]) == "decoder.1.cross"
    assert sharpest_layer(transformer, number_pairs(9, seed=7)) in attention_names(transformer, "cross")


def test_empty_texts_have_no_links(transformer):
    assert align(transformer, [("", "un"), ("one", ""), ("one", "un")], "decoder.0.cross") == [[], [], [(0, 0)]]


def test_long_lines_are_an_error_or_truncated(monkeypatch, transformer):
    monkeypatch.setattr(Translator, "length_limit", 16)  # as with learned positions
    long = ("one " * 20, "un " * 20)
    with pytest.raises(RegardError, match="line 2 has 20 tokens"):
        align(transformer, [("one", "un"), long], "decoder.0.cross")
    links = align(transformer, [long], "decoder.0.cross", truncate=True)[0]
    assert {target for _, target in links} == set(range(15))


def test_model_without_attention_is_an_error(blind):
    with pytest.raises(RegardError, match="has no attention"):
        align(blind, [("one", "un")])


def test_pharaoh_format_is_written_and_read(tmp_path):
    path = tmp_path / "gold.txt"
    alignments = [[(0, 0), (12, 3)], [], [(1, 1)]]
    path.write_text("".join(format_links(links) + "\n" for links in alignments))
    assert read_links(path) == alignments
    path.write_text("0-0\n0-0 1:1\n")
    with pytest.raises(RegardError, match=r"gold.txt, line 2: invalid link '1:1'"):
        read_links(path)
    path.write_text("1" * 5000 + "-0\n")
    with pytest.raises(RegardError, match=r"gold.txt, line 1: invalid link"):
        read_links(path)


def test_recurrent_alignments_of_a_batch_match_single_pairs():
    """Bahdanau attention is recorded step by step; the rows of short targets end early."""
    pairs = number_pairs(12, seed=8)
    tokenizer = Tokenizer.train([side for pair in pairs for side in pair], "word")
    size = tokenizer.vocab_size
    config = Seq2SeqConfig(width=16, attention="bahdanau", score="concat", dropout=0)
    config = dataclasses.replace(config, source_vocab=size, target_vocab=size)
    translator = Translator(make_model(config).eval(), tokenizer, tokenizer)
    assert align(translator, pairs) == [align(translator, [pair])[0] for pair in pairs]


@pytest.mark.parametrize(
    "special",
    [
        SpecialTokens(end=3),
        SpecialTokens(begin=4, end=3),
        SpecialTokens(end=3, forced=4),
        SpecialTokens(begin=4, end=3, forced=5),
        SpecialTokens(end=3, after_end=4, sos=5),
        SpecialTokens(),
        SpecialTokens(begin=4),
    ],
    ids=["end", "begin end", "end forced", "begin end forced", "after end", "none", "begin"],
)
def test_special_tokens_do_not_shift_links(special):
    """Imported models may add a token before the source, and force one after <sos> (BART)."""
    pairs = [*number_pairs(6, seed=9), ("one", "un")]
    tokenizer = Tokenizer.train([side for pair in pairs for side in pair], "word")
    size = tokenizer.vocab_size
    config = TransformerConfig(width=16, heads=2, feedforward=16, source_vocab=size, target_vocab=size, max_len=16)
    translator = Translator(make_model(config).eval(), tokenizer, tokenizer, special=special)
    layer = "decoder.1.cross"
    expected = []
    for source, target in pairs:
        ids = special.add_special_tokens(tokenizer.encode(source)), special.make_decoder_input(tokenizer.encode(target))
        with record(translator.model) as recording:
            translator.model(pack([ids[0]]), pack([ids[1]]))
        weights = recording[layer].weights()[0].mean(0)
        row, column = len(special.make_decoder_input([])) - 1, int(special.begin is not None)
        rows, columns = len(target.split()), len(source.split())
        best = weights[row : row + rows, column : column + columns].argmax(1).tolist()
        expected.append(sorted((s, t) for t, s in enumerate(best)))
    assert align(translator, pairs, layer) == expected
    assert sharpest_layer(translator, pairs) in attention_names(translator, "cross")
    # Truncated to max_len, the remaining words keep their indices.
    [links] = align(translator, [("one " * 30, "un " * 30)], layer, truncate=True)
    room = 16 - max(len(special.add_special_tokens([])), len(special.make_decoder_input([])))
    assert [target for _, target in sorted(links, key=lambda link: link[1])] == list(range(room))
