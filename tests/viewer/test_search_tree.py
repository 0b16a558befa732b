"""Search trees agree with the n-best list, the model's probabilities and its attention weights."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from regard.attention import record
from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation import attention_names
from regard.models import GPT, GPTConfig
from regard.pipelines import TextGenerator
from regard.viewer import look, record_search, search_tree
from regard.viewer.page.text_scene import build_scene

SENTENCE = "one two three"
SEARCHES = {
    "beam": DecodeConfig(beam=4, n_best=3),
    "penalties": DecodeConfig(beam=3, n_best=3, length_penalty=0.6, coverage_penalty=0.4, min_len=2),
    "greedy": DecodeConfig("greedy"),
    "sample": DecodeConfig("sample", n_best=4, top_k=8),
}


@pytest.fixture(params=["transformer", "seq2seq"])
def translator(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def language_model():
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["the cat sees the dog and the dog sees the cat"] * 3, "word")
    config = GPTConfig(vocab=tokenizer.vocab_size, width=16, heads=2, layers=2, feedforward=32, max_len=32)
    return TextGenerator(GPT(config), tokenizer)


@pytest.mark.parametrize("search", SEARCHES)
def test_tree_agrees_with_the_n_best_list(translator, search):
    config = SEARCHES[search]
    tree = record_search(translator, SENTENCE, config)
    outputs = translator.translate([SENTENCE], replace(config, engine="plain"))[0]
    assert [result.text for result in tree.results] == [output.text for output in outputs]
    scores = [(result.score, result.logprob) for result in tree.results]
    for score, output in zip(scores, outputs):
        assert score == pytest.approx((output.score, output.hypothesis.logprob), rel=1e-5)
    for result, output in zip(tree.results, outputs):
        leaf = tree.nodes[result.node]
        path = [tree.nodes[number] for number in tree.path(result.node)]
        assert leaf.ends
        assert leaf.text == output.text
        assert leaf.total == pytest.approx(output.hypothesis.logprob, abs=1e-4)
        assert leaf.score == pytest.approx(output.score, abs=1e-4)
        assert [node.step for node in path] == list(range(len(path)))
        assert [node.id for node in path[:-1]] == output.hypothesis.ids
        assert [node.logprob for node in path] == pytest.approx(output.hypothesis.token_logprobs, abs=1e-4)
    best = tree.path(tree.results[0].node)
    assert [number for number, node in enumerate(tree.nodes) if node.state == "best"] == best


def test_log_probabilities_are_those_of_the_model(transformer):
    """Reference: each kept output is run through the model, and its next tokens are ranked."""
    tree = record_search(transformer, SENTENCE, DecodeConfig(beam=3))
    source = transformer.encode_source(SENTENCE)
    kept = [[]]
    for step in range(tree.steps):
        candidates = []
        for ids in kept:
            with torch.no_grad():
                logits = transformer.model(*transformer.teacher_forced([(source, ids)]))[-1]
            for token, logprob in enumerate(logits.log_softmax(-1).tolist()):
                if token not in (transformer.special.pad, transformer.special.sos):
                    candidates.append(([*ids, token], logprob))
        totals = {tuple(ids): logprob + _total(tree, ids[:-1]) for ids, logprob in candidates}
        ranked = sorted(totals, key=lambda ids: -totals[ids])[:6]
        here = [(number, node) for number, node in enumerate(tree.nodes) if node.step == step]
        spelt = [tuple(tree.nodes[one].id for one in tree.path(number)) for number, _ in here]
        assert spelt == ranked
        assert [node.total for _, node in here] == pytest.approx([totals[ids] for ids in ranked], abs=1e-4)
        goes_on = [ids for ids in ranked if ids[-1] != transformer.special.eos][:3]
        ended = [ids for ids in ranked[:3] if ids[-1] == transformer.special.eos]
        statuses = ["live" if ids in goes_on else "end" if ids in ended else "pruned" for ids in ranked]
        seen = ["end" if node.ends else "pruned" if node.state == "pruned" else "live" for _, node in here]
        assert seen == statuses
        kept = [list(ids) for ids in goes_on]


def _total(tree, ids):
    for number, node in enumerate(tree.nodes):
        if node.step == len(ids) - 1 and [tree.nodes[one].id for one in tree.path(number)] == list(ids):
            return node.total
    return 0.0


def test_rows_are_the_attention_weights_of_each_step(translator):
    tree = record_search(translator, SENTENCE, DecodeConfig(beam=3))
    np.testing.assert_allclose(tree.weights.sum(1), 1, atol=1e-5)
    assert tree.source == ["one", "two", "three", "<eos>"]
    assert tree.attention in attention_names(translator, "cross")
    # Weights recorded during a greedy search are the rows of its tree.
    alone = record_search(translator, SENTENCE, DecodeConfig("greedy"))
    with record(translator.model, alone.attention) as recording:
        translator.translate([SENTENCE], DecodeConfig("greedy"))
    path = [alone.nodes[number] for number in alone.path(alone.results[0].node)]
    seen = recording[alone.attention].weights()[0].mean(0).numpy()
    np.testing.assert_allclose(alone.weights[[node.row for node in path]], seen, atol=1e-5)
    # Siblings share a row; other nodes have different rows.
    assert len({(node.parent, node.row) for node in tree.nodes}) == len({node.parent for node in tree.nodes})
    assert len(tree.weights) == len({node.row for node in tree.nodes})


def test_tree_shows_prefix_and_length_constraints(transformer):
    tree = record_search(transformer, SENTENCE, DecodeConfig(beam=3, min_len=3, max_len=4), prefix="deux un")
    assert tree.prefix == ["deux", "un"]
    assert tree.limit == 4
    assert all(one.text.startswith("deux un") for one in tree.results)
    first = [node for node in tree.nodes if node.step == 0]
    assert [(node.token, node.state) for node in first if node.state != "refused"] == [("deux", "best")]
    refused = [node for node in first if node.state == "refused"]
    assert len(refused) == search_tree.MAX_REFUSED
    assert {node.reason for node in refused} == {"prefix"}
    assert all(math.isnan(node.score) and node.logprob < 0 for node in refused)
    reasons = {node.reason for node in tree.nodes if node.state == "refused" and node.step == 2}
    assert reasons <= {"min_len"}


def test_tree_shows_lexical_constraints(seq2seq, language_model):
    phrases = {"required": ["neuf dix"], "forbidden": ["deux"]}
    tree = record_search(seq2seq, SENTENCE, DecodeConfig(beam=3), **phrases)
    assert "neuf dix" in tree.results[0].text
    assert "deux" not in tree.results[0].text
    refused = {(node.token, node.reason) for node in tree.nodes if node.state == "refused"}
    assert refused >= {("<eos>", "required"), ("deux", "forbidden")}
    assert "required" in {node.reason for node in tree.nodes if node.state == "pruned"}
    tree = record_search(language_model, "the cat", DecodeConfig("greedy", max_len=5), forbidden=["sees", "dog"])
    assert not {"sees", "dog"} & set(tree.results[0].text.split())


def test_tree_of_a_language_model(language_model):
    config = DecodeConfig(beam=3, n_best=2, max_len=5)
    tree = record_search(language_model, "the cat", config)
    written = language_model.generate(["the cat"], config)[0]
    assert [(one.text, one.score) for one in tree.results] == [(one.text, one.score) for one in written]
    assert tree.limit == 5
    for node in tree.nodes:
        row = tree.weights[node.row]
        before = len(tree.source) + node.step
        assert row[:before].sum() == pytest.approx(1, abs=1e-5)
        assert not row[before:].any()
    with torch.no_grad(), record(language_model.model, tree.attention) as recording:
        ids = [tree.nodes[one].id for one in tree.path(tree.results[0].node)]
        language_model.model(language_model.pack([[*language_model.encode_prompt("the cat"), *ids[:2]]]))
    last = recording[tree.attention].weights()[0].mean(0)[-1].numpy()
    third = tree.nodes[tree.path(tree.results[0].node)[2]]
    np.testing.assert_allclose(tree.weights[third.row][: len(last)], last, atol=1e-5)


def test_tree_of_a_model_without_attention_has_no_weights(blind):
    tree = record_search(blind, SENTENCE)
    assert tree.attention is None
    assert tree.weights.shape == (0, 4)
    assert {node.row for node in tree.nodes} == {None}


def test_invalid_searches_raise_errors(transformer, language_model):
    with pytest.raises(RegardError, match="empty"):
        record_search(transformer, " ")
    with pytest.raises(RegardError, match="Only translators support a prefix"):
        record_search(language_model, "the cat", prefix="sees")
    with pytest.raises(RegardError, match="no search to record"):
        record_search(object(), "the cat")
    with pytest.raises(RegardError, match="no search to configure"):
        look(transformer, SENTENCE, "un", prefix="un")


def test_large_trees_omit_candidates_but_keep_paths_to_outputs(transformer, monkeypatch):
    config = DecodeConfig(beam=6, n_best=6)
    whole = record_search(transformer, SENTENCE, config)
    monkeypatch.setattr(search_tree, "MAX_CANDIDATES", 4)
    thin = record_search(transformer, SENTENCE, config)
    counts = [sum(node.step == step for node in thin.nodes) for step in range(thin.steps)]
    assert max(counts) <= 6  # more than 4 only on the paths to outputs
    assert len(thin.nodes) + sum(thin.omitted) >= len(whole.nodes)
    assert sum(whole.omitted) == 0 < sum(thin.omitted)
    assert [one.text for one in thin.results] == [one.text for one in whole.results]
    for one in thin.results:
        assert thin.nodes[one.node].text == one.text
        assert [thin.nodes[n].text for n in thin.path(one.node)][-1] == one.text


def test_scene_contains_the_search_tree(transformer):
    assert build_scene(look(transformer, SENTENCE, "un deux")).header["decode"] is None
    seen = look(transformer, SENTENCE, config=DecodeConfig(beam=2, n_best=2), prefix="un")
    scene = build_scene(seen)
    header = scene.header["decode"]
    assert seen.search_tree.attention == header["attention"] == seen.alignment.name
    assert header["source"] == scene.header["sides"]["source"]["tokens"]
    assert header["prefix"] == ["un"]
    assert (header["method"], header["beam"]) == ("beam", 2)
    blob = header["weights"]
    rows = np.frombuffer(scene.blobs[blob["at"]], "<f4").reshape(blob["shape"])
    np.testing.assert_array_equal(rows, seen.search_tree.weights)
    texts = []
    for node in header["nodes"]:
        before = "" if node["parent"] is None or node["whole"] else texts[node["parent"]]
        texts.append(before + node["piece"])
    assert texts == [node.text for node in seen.search_tree.nodes]
    assert texts[header["results"][0]["node"]] == seen.translation
    assert look(transformer, SENTENCE).translation == transformer(SENTENCE)
