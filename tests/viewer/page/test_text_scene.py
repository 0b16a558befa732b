"""Scenes: a NumPy reference computes the recorded weights from q and k."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import tokenizers
import torch
from torch import nn

from regard.attention import Dot, Mask, Offsets, Recorded, ScaledDot, Score, causal, padding, window
from regard.attention.backends.call import Call
from regard.attention.masks import MaskParts
from regard.attention.scores import DotLike
from regard.data import Tokenizer
from regard.errors import RegardError
from regard.layers.positions import RelativeBias
from regard.models import BertConfig, GPTConfig, Seq2SeqConfig, TransformerConfig, make_model
from regard.models.transformer import t5_small
from regard.pipelines import TextEncoder, TextGenerator, Translator
from regard.version import __version__
from regard.viewer import AttentionMap, Look, look
from regard.viewer.page import text_scene
from regard.viewer.page.text_scene import Scene
from regard.viewer.token_axis import TokenAxis, build_axis
from tests.attention.helpers import SCORE_NAMES, Slope, masks, scores
from tests.viewer.helpers import weights

# Without the step-by-step view, which takes longer than all the rest; tests/viewer/trace is about it.
build_scene = partial(text_scene.build_scene, trace=False)
SOURCE, TARGET = "one two three four", "quatre trois deux"
WORDS = [*SOURCE.split(), *TARGET.split()]


def test_warnings_of_long_and_of_truncated_texts(transformer, monkeypatch):
    monkeypatch.setattr(Translator, "trained_length", 5)
    long = build_scene(look(transformer, "one two three four five", "un")).header["warning"]
    assert long == "The text has 6 tokens, more than any in training (5): the output may be worse."
    cut = build_scene(look(transformer, "one two three four five", "un", truncate=True)).header["warning"]
    assert cut == "The text has 5 tokens; the model reads only 4 of them."
    assert build_scene(look(transformer, "one two three four", "un")).header["warning"] is None


def make_look(*calls: Call, kind: str = "self", name: str = "blocks.0.attention") -> Look:
    """A look with recorded calls of one attention."""
    recorded = Recorded(name, kind, calls=list(calls))
    T, S = recorded.weights().shape[2:]
    axes = (
        TokenAxis(name, [f"{name}{i}" for i in range(n)], list(range(n))) for name, n in (("rows", T), ("columns", S))
    )
    return Look("text", "", [], [], {name: AttentionMap(name, kind, *axes, recorded)})


def compare(seen: Look, made: Scene | None = None, tolerance: float = 1e-6) -> None:
    made = made or build_scene(seen)
    assert [one["name"] for one in made.header["attentions"]] == list(seen.maps)
    for name, one in seen.maps.items():
        assert len(np.unique(one.weights)) > 1
        np.testing.assert_allclose(weights(made, name), one.weights, rtol=0, atol=tolerance)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_call(score: Score, mask: Mask | None = None, bias=None, *, H=4, G=4, T=5, S=7, D=6, C=6, B=1) -> Call:
    q, k = random(B, H, T, D, seed=1), random(B, G, S, C, seed=2)
    return Call(q, k, k, score, MaskParts.from_mask(mask), bias)


# Scores, masks, bias


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_every_score_with_grouped_keys(name, groups):
    torch.manual_seed(0)
    call = make_call(scores(6, 6, 7, 4)[name], G=groups)
    seen = make_look(call)
    compare(seen)
    (one,) = build_scene(seen).header["attentions"]
    assert one["score"]["name"] == name.partition("-")[0]
    assert (one["w"] is not None) == name.startswith("concat")


@pytest.mark.parametrize("name", ["general", "concat", "concat-heads", "location"])
def test_queries_and_keys_of_different_widths(name):
    torch.manual_seed(0)
    compare(make_look(make_call(scores(6, 8, 7, 4)[name], D=6, C=8)))


def test_shared_keys_are_stored_once():
    torch.manual_seed(0)

    def heads_of_keys(score: str, groups: int) -> int:
        made = build_scene(make_look(make_call(scores(6, 6, 7, 4)[score], G=groups)))
        return made.header["attentions"][0]["k"]["shape"][1]

    assert [heads_of_keys("scaled_dot", groups) for groups in (4, 2, 1)] == [4, 2, 1]
    assert [heads_of_keys("general-heads", groups) for groups in (4, 2, 1)] == [4, 2, 1]
    assert heads_of_keys("concat-heads", 2) == 4  # one key matrix per head
    assert heads_of_keys("location", 4) == 1


@pytest.mark.parametrize("T", [7, 5, 9])
@pytest.mark.parametrize("name", sorted(masks(torch.tensor([1]))))
def test_every_mask(name, T):
    """Includes queries before the first key and fully masked queries."""
    mask = masks(torch.tensor([4, 6]))[name]
    compare(make_look(make_call(ScaledDot(), mask, T=T, B=2)))


def test_fully_masked_query_has_zeros():
    made = build_scene(make_look(make_call(Dot(), causal() & window(3) & padding(torch.tensor([2])), T=7)))
    assert weights(made, "blocks.0.attention")[:, 4:].sum() == 0


@pytest.mark.parametrize("T", [7, 5, 9])
@pytest.mark.parametrize(
    "bias", [RelativeBias(4, bidirectional=True), RelativeBias(4, bidirectional=False, distance=4), Slope(4)]
)
def test_relative_bias(bias, T):
    seen = make_look(make_call(Dot(), bias=bias, T=T))
    compare(seen)
    with_bias, without = (build_scene(one) for one in (seen, make_look(make_call(Dot(), T=T))))
    assert np.abs(weights(with_bias, "blocks.0.attention") - weights(without, "blocks.0.attention")).max() > 0.01


def test_scene_of_packed_sequences_contains_the_first():
    offsets = Offsets.from_starts(torch.tensor([0, 5, 12]))
    q = random(12, 4, 6, seed=1)
    packed = Call(
        q,
        q[:, :2],
        q[:, :2],
        ScaledDot(),
        MaskParts.from_mask(causal()),
        RelativeBias(4, bidirectional=False),
        offsets,
        offsets,
    )
    alone = packed._replace(
        q=q[:5].transpose(0, 1)[None], k=q[:5, :2].transpose(0, 1)[None], q_offsets=None, k_offsets=None
    )
    made = build_scene(make_look(alone)).blobs
    whole = make_look(packed)
    sides = (TokenAxis(name, list("abcde"), [0] * 5) for name in ("rows", "columns"))
    shown = AttentionMap("blocks.0.attention", "self", *sides, whole.maps["blocks.0.attention"].recorded)
    assert build_scene(dataclasses.replace(whole, maps={shown.name: shown})).blobs == made


# Models


def make_translator(config: TransformerConfig | Seq2SeqConfig) -> Translator:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([" ".join(WORDS)], "word")
    size = tokenizer.vocab_size
    model = make_model(dataclasses.replace(config, source_vocab=size, target_vocab=size, dropout=0.0))
    return Translator(amplify_weights(model), tokenizer, tokenizer)


def amplify_weights(model: nn.Module) -> nn.Module:
    """Amplify weights: freshly initialized models attend almost uniformly."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "score" not in name:
                parameter *= 2
    return model.eval()


SMALL = dict(width=16, heads=4, feedforward=16, encoder_layers=1, decoder_layers=2)


@pytest.mark.parametrize("score", ["dot", "scaled_dot", "cosine", "general", "concat", "location"])
@pytest.mark.parametrize("kv_heads", [0, 2])
def test_transformers(score, kv_heads):
    chosen = dict(encoder_score=score, decoder_score=score, cross_score=score)
    translator = make_translator(TransformerConfig(**SMALL, **chosen, kv_heads=kv_heads, positions="rotary"))
    seen = look(translator, SOURCE, TARGET)
    made = build_scene(seen)
    compare(seen, made)
    assert made.header["model"] == {"family": "transformer", "name": "", "regard": __version__}
    assert {one["score"]["name"] for one in made.header["attentions"]} == {score}


def test_t5_has_a_bias_in_self_attention():
    seen = look(make_translator(t5_small(**SMALL, head_width=8)), SOURCE, TARGET)
    made = build_scene(seen)
    compare(seen, made)
    assert [one["bias"] is not None for one in made.header["attentions"]] == [True, True, False, True, False]


@pytest.mark.parametrize("score", ["dot", "scaled_dot", "cosine", "general", "concat", "location"])
@pytest.mark.parametrize("kind", ["luong", "bahdanau"])
def test_recurrent_models(kind, score):
    """Bahdanau attention is called once per step; the calls are one attention."""
    seen = look(make_translator(Seq2SeqConfig(width=16, attention=kind, score=score)), SOURCE, TARGET)
    assert len(seen.maps["decoder.attention"].recorded.calls) == (1 if kind == "luong" else 4)
    compare(seen)


def make_text_pipeline(family: str) -> TextGenerator | TextEncoder:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([" ".join(WORDS)], "word", mask=family == "bert")
    sizes = dict(width=16, heads=4, feedforward=16, dropout=0.0, vocab=tokenizer.vocab_size)
    if family == "gpt":
        return TextGenerator(amplify_weights(make_model(GPTConfig(**sizes, layers=2, kv_heads=2))), tokenizer)
    return TextEncoder(amplify_weights(make_model(BertConfig(**sizes, layers=4, groups=2))), tokenizer)


def test_language_models():
    seen = look(make_text_pipeline("gpt"), SOURCE)
    made = build_scene(seen)
    compare(seen, made)
    assert [one["mask"] for one in made.header["attentions"]] == [{"op": "causal"}] * 2
    assert [one["k"]["shape"] for one in made.header["attentions"]] == [[5, 2, 4]] * 2


def test_sliding_windows_and_soft_capping():
    generator = make_text_pipeline("gpt")
    config = dataclasses.replace(generator.model.config, sliding_windows=(2, 0), score_cap=0.7)
    seen = look(dataclasses.replace(generator, model=amplify_weights(make_model(config))), SOURCE)
    made = build_scene(seen)
    compare(seen, made)
    assert [one["mask"] for one in made.header["attentions"]] == [{"op": "window", "size": 2}, {"op": "causal"}]
    assert made.header["attentions"][0]["score"]["cap"] == 0.7


def test_local_attention_and_relative_positions_of_encoders():
    encoder = make_text_pipeline("bert")
    changes = {"groups": 0, "sliding_windows": (0, 1), "relative": "disentangled"}
    for buckets, distance in ((8, 5), (32, 0)):
        config = dataclasses.replace(
            encoder.model.config, **changes, relative_buckets=buckets, relative_distance=distance
        )
        seen = look(dataclasses.replace(encoder, model=amplify_weights(make_model(config))), SOURCE)
        made = build_scene(seen)
        compare(seen, made)
        assert [one["mask"] for one in made.header["attentions"]] == [None, {"op": "local", "size": 1}] * 2
        assert {one["score"]["name"] for one in made.header["attentions"]} == {"disentangled"}
        T, _, width = made.header["attentions"][0]["q"]["shape"]
        assert width == 4 + min(buckets, 2 * T - 1)  # only positions that occur
    config = dataclasses.replace(config, relative="bias", relative_buckets=6, relative_distance=4)
    compare(
        seen := look(dataclasses.replace(encoder, model=amplify_weights(make_model(config))), SOURCE), build_scene(seen)
    )


def test_layers_with_shared_weights_are_separate_attentions():
    seen = look(make_text_pipeline("bert"), SOURCE)
    made = build_scene(seen)
    compare(seen, made)
    names = [f"blocks.{group}.attention.{number}" for group in (0, 1) for number in (0, 1)]
    assert [(one["name"], one["layer"]) for one in made.header["attentions"]] == list(zip(names, range(4)))


# Quantization


@pytest.mark.parametrize("score", ["scaled_dot", "concat"])
def test_large_scenes_are_quantized_to_uint16(monkeypatch, score):
    chosen = dict(encoder_score=score, decoder_score=score, cross_score=score)
    seen = look(make_translator(TransformerConfig(**SMALL, **chosen, positions="relative")), SOURCE, TARGET)
    exact = build_scene(seen)
    size = sum(len(exact.blobs[one[x]["at"]]) for one in exact.header["attentions"] for x in "qk")
    monkeypatch.setattr(text_scene, "MAX_EXACT_BYTES", size)
    assert build_scene(seen).blobs == exact.blobs
    monkeypatch.setattr(text_scene, "MAX_EXACT_BYTES", size - 1)
    made = build_scene(seen)
    compare(seen, made, tolerance=1e-3)
    types = {x: {one[x]["type"] for one in made.header["attentions"] if one[x]} for x in ("q", "k", "w", "bias")}
    assert types == {
        "q": {"uint16"},
        "k": {"uint16"},
        "w": {"float32"} if score == "concat" else set(),
        "bias": {"float32"},
    }
    with pytest.raises(AssertionError):
        compare(seen, made, tolerance=1e-7)


def test_quantization_of_keys_far_from_zero(monkeypatch):
    """As in models whose keys have a bias; float16 would be wrong by more than 0.05."""
    monkeypatch.setattr(text_scene, "MAX_EXACT_BYTES", 0)
    call = make_call(ScaledDot(), T=64, S=64, D=16, C=16)
    k = call.k + 500 * random(1, 4, 1, 16, seed=3)
    seen = make_look(call._replace(k=k))
    compare(seen, tolerance=2e-3)
    halved = make_look(call._replace(q=call.q.half().float(), k=k.half().float()))
    name = "blocks.0.attention"
    assert np.abs(halved.maps[name].weights - seen.maps[name].weights).max() > 0.05


def test_quantization_of_constant_channels(monkeypatch):
    monkeypatch.setattr(text_scene, "MAX_EXACT_BYTES", 0)
    call = make_call(Dot())
    call.q[..., 0], call.k[..., 1:3] = 0.25, 0.0
    compare(make_look(call), tolerance=1e-3)


# Unsupported attention


class Distance(Score):
    def pair_scores(self, q, k):
        return -torch.cdist(q, k)


class Doubled(DotLike):
    def transform(self, q, k, positions=None):
        return 2 * q, k, 1.0


class Even(Mask):
    def block(self, p, s):
        return (s % 2 == 0).expand(len(p), -1)


class Absolute(nn.Module):
    def forward(self, p, s):
        return (p[:, None] * s).float().expand(4, -1, -1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (make_call(Distance()), "score Distance"),
        (make_call(Dot(), Even()), "mask Even"),
        (make_call(Dot(), bias=Absolute()), "bias Absolute"),
    ],
)
def test_unsupported_scores_masks_and_biases_raise_errors(call, message):
    with pytest.raises(RegardError, match=f"cannot compute the {message}.*Save a plot"):
        build_scene(make_look(call))


def test_custom_dot_product_score():
    seen = make_look(make_call(Doubled()))
    compare(seen)
    assert build_scene(seen).header["attentions"][0]["score"] == {"name": "Doubled", "form": "dot", "scale": 1.0}


def test_calls_with_growing_keys_raise_an_error():
    steps = [make_call(Dot(), causal(), T=1, S=n) for n in (1, 2, 3)]
    with pytest.raises(RegardError, match="called several times"):
        build_scene(make_look(*steps))


# The header


def test_axes_words_and_initial_view(transformer):
    seen = look(transformer, "one two three", "trois deux", name="numbers")
    header = build_scene(seen, "decoder.0.cross", 1).header
    sides = {name: (side["title"], side["tokens"], side["words"]) for name, side in header["sides"].items()}
    assert sides == {
        "source": ("Source", ["one", "two", "three", "<eos>"], [0, 1, 2, -1]),
        "target": ("Target", ["<sos>", "trois", "deux"], [-1, 0, 1]),
        "predicted": ("Translation", ["trois", "deux", "<eos>"], [0, 1, -1]),
    }
    axes = [(one["kind"], one["layer"], one["rows"], one["columns"]) for one in header["attentions"]]
    assert axes == [
        ("self", 0, "source", "source"),
        ("masked", 0, "target", "target"),
        ("cross", 0, "predicted", "source"),
        ("masked", 1, "target", "target"),
        ("cross", 1, "predicted", "source"),
    ]
    assert (header["title"], header["texts"]) == (
        "one two three  →  trois deux",
        {"source": "one two three", "target": "trois deux"},
    )
    assert header["model"]["name"] == "numbers"
    assert header["links"] is None
    assert header["initial"] == {"attention": "decoder.0.cross", "head": 1, "all": False}
    assert build_scene(seen, head=1).header["initial"] == {"attention": seen.alignment.name, "head": 1, "all": False}
    assert build_scene(seen, overview=True).header["initial"] == {"attention": None, "head": None, "all": True}
    assert build_scene(seen).header["initial"] is None


def test_single_text_has_one_axis():
    header = build_scene(look(make_text_pipeline("bert"), "one two three")).header
    assert header["sides"]["text"] == {
        "title": "Text",
        "tokens": ["<sos>", "one", "two", "three", "<eos>"],
        "words": [-1, 0, 1, 2, -1],
        "direction": "ltr",
        "entries": {"1": "▁one", "2": "▁two", "3": "▁three"},
    }
    assert {(one["rows"], one["columns"]) for one in header["attentions"]} == {("text", "text")}
    assert header["texts"]["target"] == ""
    assert header["model"]["family"] == "bert"


@pytest.mark.parametrize("kind", ["bpe", "char", "bytes", "space", "word"])
def test_word_indices_of_pieces(kind):
    text = "l'homme  mange, oui"
    tokenizer = Tokenizer.train([text, "non"], kind, vocab_size=300 if kind == "bytes" else 30)
    translator = make_translator(TransformerConfig(**SMALL))
    size = tokenizer.vocab_size
    model = make_model(dataclasses.replace(translator.model.config, source_vocab=size, target_vocab=size))
    side = build_scene(look(Translator(model, tokenizer, tokenizer), text, "non")).header["sides"]["source"]
    for number, word in enumerate(text.split()):
        own = [token for token, its in zip(side["tokens"], side["words"]) if its == number]
        assert "".join(own) == word
    assert side["words"][-1] == -1
    if kind == "char":
        assert [side["words"][i] for i, token in enumerate(side["tokens"]) if token == " "] == [-1, -1]


def test_word_indices_of_ids_that_the_tokenizer_would_not_choose():
    """A translation may contain <unk>, or other pieces than the tokenizer would choose."""
    tokenizer = Tokenizer.train(["ab ab", "a b"], "bpe", vocab_size=30)
    letters = [tokenizer.backend_tokenizer.token_to_id(piece) for piece in ("▁", "a", "b")]
    side = build_axis(tokenizer, "ab ab", [*letters, 1, *tokenizer.encode("ab")], str.split)
    assert side.tokens[3:] == ["<unk>", "ab"]
    assert side.words[-1] == max(side.words) == 1
    assert tokenizer.encode("ab ab") != letters


def test_text_truncated_at_its_beginning_keeps_its_pieces():
    language_model = make_text_pipeline("gpt")
    language_model.model.config = dataclasses.replace(language_model.model.config, max_len=4)
    seen = look(language_model, "one zebra three four zoo", truncate=True)
    assert seen.source_pieces[1:] == ["three", "four", "zoo"]
    assert build_scene(seen).header["sides"]["text"]["words"] == [-1, 2, 3, 4]


def test_entries_of_the_vocabulary_name_unknown_tokens():
    pipeline = make_text_pipeline("bert")
    entries = build_scene(look(pipeline, "one zebra")).header["sides"]["text"]["entries"]
    assert entries == {"1": "▁one", "2": "<unk>"}


def test_leading_space_of_llama_is_not_the_first_letter():
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"▁": 0, "h": 1, "i": 2, "<unk>": 3}, [], unk_token="<unk>"))
    normalizers = tokenizers.normalizers
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    axis = build_axis(Tokenizer(library, "foreign"), "hi", [0, 1, 2], str.split)
    assert axis.tokens == ["▁", "h", "i"]
    assert axis.words[1:] == [0, 0]


def test_direction_is_that_of_the_first_letter(transformer):
    sides = build_scene(look(transformer, "123 «שלום» one", "one")).header["sides"]
    assert (sides["source"]["direction"], sides["target"]["direction"]) == ("rtl", "ltr")
    assert build_scene(look(transformer, "12 ؟ 34", "مرحبا one")).header["sides"]["predicted"]["direction"] == "rtl"


def test_gold_links(transformer):
    seen = look(transformer, "one two", "deux un", gold=[(1, 0), (0, 1), (1, 0)])
    assert build_scene(seen).header["links"] == [[1, 0], [0, 1]]  # (target, source)
    for gold, target, message in [
        ([(0, 2)], "deux un", "0-2 is out of range. The source has 2 words and the target 2"),
        ([(-1, 0)], "deux un", "-1-0 is out of range"),
        ([(0, 0)], None, "Gold links need a target"),
    ]:
        with pytest.raises(RegardError, match=message):
            look(transformer, "one two", target, gold=gold)


def test_custom_word_splitter(transformer):
    header = build_scene(look(transformer, "one-two", "un", words=lambda text: text.split("-"))).header
    assert header["sides"]["source"]["words"] == [0, -1, 1, -1]


def test_selected_layers_only(transformer):
    seen = look(transformer, "one two", "un", layers="decoder.*.cross")
    assert list(seen.maps) == ["decoder.0.cross", "decoder.1.cross"]
    assert set(build_scene(seen).header["sides"]) == {"predicted", "source"}
    compare(seen)
    assert list(look(make_text_pipeline("gpt"), "one", layers="blocks.1.*").maps) == ["blocks.1.attention"]
    with pytest.raises(RegardError, match="No attention module of the model matches encoder"):
        look(transformer, "one", "un", layers="encoder.9")


def test_long_titles_are_truncated(transformer):
    title = build_scene(look(transformer, "one " * 15 * 3, "un " * 15, truncate=True)).header["title"]
    assert len(title) == 100
    assert title.endswith("…")


def test_sharpness_of_a_long_text_uses_a_sample_of_rows(monkeypatch, transformer):
    monkeypatch.setattr("regard.viewer.text_look.SAMPLE_ROWS", 3)
    sampled_queries = []
    original = Recorded.weights

    def weights_of(self, heads=None, queries=None):
        sampled_queries.append(queries)
        return original(self, heads, queries)

    monkeypatch.setattr(Recorded, "weights", weights_of)
    build_scene(look(transformer, SOURCE, "quatre trois deux un"), head=0)
    assert sampled_queries == [[0, 2, 4]] * 2  # only for the two cross-attentions


def test_scene_of_a_bfloat16_model():
    """Under autocast q and k are bfloat16; weights are computed in float32 in the model and in the page."""
    call = make_call(ScaledDot(), causal(), T=7)
    compare(make_look(call._replace(q=call.q.bfloat16(), k=call.k.bfloat16())))
