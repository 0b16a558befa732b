"""Vocabulary shortlists: engine and plain search restrict each sentence to its own tokens, whatever its batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from regard.decode import (
    DecodeConfig,
    Ensemble,
    LexicalConstraints,
    Request,
    Shortlist,
    TokenTexts,
    decode_all,
    engine,
    explain,
)
from regard.decode.protocol import SpecialTokens
from regard.errors import RegardError
from regard.layers.packed import pack
from tests.decode.models import (
    CONFIGS,
    VOCAB,
    assert_equal_search,
    decode_both,
    gpt,
    make_sources,
    seq2seq,
    special_options,
    transformer,
)


def make_shortlist(per_token=6, frequent=8, seed=0) -> Shortlist:
    draw = np.random.default_rng(seed)
    targets = draw.integers(4, VOCAB, (VOCAB, per_token)).astype(np.int32)
    targets[::7, 3:] = -1  # rare tokens have few targets
    return Shortlist(targets, draw.integers(4, VOCAB, frequent).astype(np.int32), VOCAB)


SHORTLIST = make_shortlist()


def assert_allowed(results, sources, model, prefixes=None):
    special = special_options(model)["special"]
    for i, (source, n_best) in enumerate(zip(sources, results)):
        allowed = set(SHORTLIST.allowed_tokens(source, special, prefixes[i] if prefixes else ()).tolist())
        assert n_best
        assert all(set(hypothesis.ids) <= allowed for hypothesis in n_best)


def with_shortlist(name):
    return replace(CONFIGS[name], shortlist=True)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("make", [transformer, seq2seq, gpt])
def test_engine_equals_plain_search(make, config):
    model = make()
    sources = make_sources(2 if CONFIGS[config].beam > 100 else 9)
    with explain() as choices:
        fast, plain = decode_both(model, sources, with_shortlist(config), shortlist=SHORTLIST)
    assert [choice.stepper == "model" for choice in choices] == [False, True]
    assert_equal_search(fast, plain)
    assert_allowed(fast, sources, model)


def test_models_with_output_bias_and_ensembles():
    biased = transformer(output_bias=True, tied=False)
    with torch.no_grad():
        biased.output.bias.normal_()
    for model in (biased, Ensemble([transformer(1), seq2seq(3)]).eval()):
        for name in ("greedy", "beam"):
            fast, plain = decode_both(model, make_sources(), with_shortlist(name), shortlist=SHORTLIST)
            assert_equal_search(fast, plain)
            assert_allowed(fast, make_sources(), model)


def test_log_probabilities_are_normalized_over_the_list_of_the_sentence():
    model, sources = transformer(), make_sources(4)
    (first, *_) = decode_all(
        model, Request(sources, DecodeConfig("greedy", max_len=3, shortlist=True), shortlist=SHORTLIST)
    )
    allowed = SHORTLIST.allowed_tokens(sources[0], SpecialTokens())
    logits, _ = model.step(model.start(pack(sources[:1])), torch.tensor([[2]]))
    expected = logits[0, 0, torch.from_numpy(allowed).long()].log_softmax(0).tolist()
    at = allowed.tolist().index(first[0].ids[0] if first[0].ids else 3)
    assert first[0].token_logprobs[0] == pytest.approx(expected[at], abs=1e-4)


@pytest.mark.parametrize("config", ["greedy", "beam", "samples"])
def test_suppressed_tokens_outside_the_shortlist_have_no_effect(config):
    model, sources = transformer(), make_sources()
    special = special_options(model)["special"]
    allowed = {token for source in sources for token in SHORTLIST.allowed_tokens(source, special).tolist()}
    outside = tuple((token,) for token in range(VOCAB) if token not in allowed)
    assert outside
    suppressed = replace(with_shortlist(config), suppress_sequences=outside)
    fast, plain = decode_both(model, sources, suppressed, shortlist=SHORTLIST)
    assert_equal_search(fast, plain)
    assert fast == decode_both(model, sources, with_shortlist(config), shortlist=SHORTLIST)[0]


@pytest.mark.parametrize("precision", ["auto", "int8"])
@pytest.mark.parametrize("config", ["greedy", "beam", "samples"])
def test_results_do_not_depend_on_the_batch(monkeypatch, config, precision):
    """Slots are refilled with other sentences, so the union changes while a sentence is decoded."""
    monkeypatch.setattr(engine, "CPU_ROWS", 12)
    model, sources = transformer(), make_sources(30, longest=14)
    options = {"shortlist": SHORTLIST, **special_options(model)}
    chosen = replace(with_shortlist(config), precision=precision)
    together = decode_all(model, Request(sources, chosen, **options))
    indices = {} if config != "samples" else {"sample_indices": [0]}
    for i, source in enumerate(sources):
        if indices:
            indices = {"sample_indices": [i]}
        alone = decode_all(model, Request([source], chosen, **options, **indices))
        assert_equal_search([together[i]], alone)
    assert_allowed(together, sources, model)


def test_int8_restricts_to_the_shortlist():
    model, sources = transformer(), make_sources()
    config = replace(with_shortlist("beam"), precision="int8")
    results = decode_all(model, Request(sources, config, shortlist=SHORTLIST, **special_options(model)))
    assert_allowed(results, sources, model)
    everything = Shortlist(SHORTLIST.targets, np.arange(VOCAB, dtype=np.int32), VOCAB)
    all_tokens = decode_all(model, Request(sources, config, shortlist=everything, **special_options(model)))
    without = decode_all(model, Request(sources, replace(config, shortlist=False), **special_options(model)))
    assert_equal_search(all_tokens, without)


@pytest.mark.parametrize("config", ["greedy", "beam", "samples"])
def test_forced_prefixes_are_allowed(config):
    model, sources = transformer(), make_sources()
    prefixes = [[token for token in source[: i % 4] if token != 3] for i, source in enumerate(make_sources(seed=1))]
    fast, plain = decode_both(model, sources, with_shortlist(config), prefixes=prefixes, shortlist=SHORTLIST)
    assert_equal_search(fast, plain)
    assert_allowed(fast, sources, model, prefixes)
    assert all(h.ids[: len(p)] == p for n_best, p in zip(fast, prefixes) for h in n_best)


def test_history_has_only_tokens_of_the_list():
    model, sources = transformer(), make_sources(3)
    for name in ("greedy", "beam"):
        results = decode_all(model, Request(sources, with_shortlist(name), shortlist=SHORTLIST, history=True))
        expected = decode_all(model, Request(sources, with_shortlist(name), shortlist=SHORTLIST))
        assert_equal_search(expected, results)
        for source, n_best in zip(sources, results):
            allowed = set(SHORTLIST.allowed_tokens(source, SpecialTokens()).tolist())
            for step in n_best.history.steps:
                assert set(step.tokens) <= allowed
                assert {token.token for token in step.refused} <= allowed


def test_required_phrases_may_contain_all_tokens():
    texts = TokenTexts([b""] * 4 + [f" {i}".encode() for i in range(4, VOCAB)])
    sources = make_sources(2)
    special = SpecialTokens()
    missing = next(i for i in range(4, VOCAB) if i not in SHORTLIST.allowed_tokens(sources[0], special))
    lexical = [LexicalConstraints(texts, (str(missing),)), LexicalConstraints(texts, (), ("7",))]
    results = decode_all(transformer(), Request(sources, with_shortlist("beam"), shortlist=SHORTLIST, lexical=lexical))
    assert missing in results[0][0].ids
    assert set(results[1][0].ids) <= set(SHORTLIST.allowed_tokens(sources[1], special).tolist())


def test_lists_without_tokens():
    """Sentences of unknown tokens have only the special tokens."""
    empty = Shortlist(np.full((VOCAB, 1), -1, np.int32), np.zeros(0, np.int32), VOCAB)
    for name in ("greedy", "beam", "samples"):
        fast, plain = decode_both(transformer(), make_sources(3), with_shortlist(name), shortlist=empty)
        assert_equal_search(fast, plain)
        assert all(set(h.ids) <= {1} for n_best in fast for h in n_best)


def test_errors():
    with pytest.raises(RegardError, match="the model has no shortlist"):
        decode_all(transformer(), Request(make_sources(1), with_shortlist("beam")))
    with pytest.raises(RegardError, match="Expected one prefix per sentence"):
        decode_all(transformer(), Request(make_sources(2), with_shortlist("beam"), shortlist=SHORTLIST, prefixes=[[]]))
