"""`look` at texts: its arrays and plots."""

import itertools
import math
import pickle
import warnings
import xml.etree.ElementTree as xml
from io import BytesIO

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.image import imread

import regard
from regard.attention import record
from regard.data import Tokenizer
from regard.data.text.questions import Question
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation import attention_names
from regard.evaluation.teacher_forcing import mutual_information
from regard.models import GPT, Bert, BertConfig, GPTConfig, Seq2SeqConfig
from regard.pipelines import TextEncoder, TextGenerator
from regard.pipelines.pipeline import TextPipeline
from regard.viewer import look, plots, text_look
from regard.viewer.page.text_scene import build_scene
from regard.viewer.search_tree import record_search
from tests.conftest import train_numbers
from tests.viewer import text_models

SENTENCE, TRANSLATION = "one two three", "trois deux un"


@pytest.fixture
def seen(transformer):
    return look(transformer, SENTENCE, TRANSLATION)


def test_maps_have_names_kinds_and_axes(seen):
    source, target = SENTENCE.split(), TRANSLATION.split()
    assert {name: (one.kind, one.weights.shape) for name, one in seen.maps.items()} == {
        "encoder.0.attention": ("self", (2, 4, 4)),
        "decoder.0.attention": ("masked", (2, 4, 4)),
        "decoder.0.cross": ("cross", (2, 4, 4)),
        "decoder.1.attention": ("masked", (2, 4, 4)),
        "decoder.1.cross": ("cross", (2, 4, 4)),
    }
    assert (seen.source_pieces, seen.target_pieces) == (source, target)
    own, masked, cross = (seen.maps[f"{n}"] for n in ("encoder.0.attention", "decoder.0.attention", "decoder.0.cross"))
    assert own.rows == own.columns == cross.columns == [*source, "<eos>"]
    assert masked.rows == masked.columns == ["<sos>", *target]
    assert cross.rows == [*target, "<eos>"]


@pytest.mark.parametrize("model", ["transformer", "seq2seq"])
def test_every_row_sums_to_one(model, request):
    seen = look(request.getfixturevalue(model), SENTENCE)
    for one in seen.maps.values():
        assert one.weights.dtype == np.float32
        np.testing.assert_allclose(one.weights.sum(-1), 1, rtol=1e-5)


def test_masked_attention_has_no_weight_on_later_tokens(seen):
    assert not np.triu(seen.maps["decoder.0.attention"].weights, k=1).any()


@pytest.mark.parametrize("model", ["transformer", "seq2seq"])
def test_row_t_has_the_weights_of_decoding_step_t(model, request):
    translator = request.getfixturevalue(model)
    with record(translator.model, attention_names(translator, "cross")) as recording:
        text = translator.translate([SENTENCE], DecodeConfig(method="greedy"))[0][0].text
    seen = look(translator, SENTENCE, text)
    for name, recorded in recording.items():
        np.testing.assert_allclose(seen.maps[name].weights, recorded.weights()[0], atol=1e-5)


def test_bahdanau_attention_is_recorded():
    translator = train_numbers(Seq2SeqConfig(width=16, attention="bahdanau", score="concat"), steps=1)
    seen = look(translator, SENTENCE, TRANSLATION)
    assert seen.maps["decoder.attention"].weights.shape == (1, 4, 4)
    np.testing.assert_allclose(seen.maps["decoder.attention"].weights.sum(-1), 1, rtol=1e-5)


def test_default_target_is_the_models_translation(seq2seq):
    seen = regard.look(seq2seq, SENTENCE)
    assert seen.translation == seq2seq(SENTENCE) == TRANSLATION
    assert seen.target_pieces == TRANSLATION.split()
    assert "decoder.attention" in repr(seen)


def test_trained_model_attends_to_the_translated_word(seq2seq):
    rows = look(seq2seq, SENTENCE).alignment.head_weights()
    assert rows[:3].argmax(1).tolist() == [2, 1, 0]


def test_mutual_information_needs_rows_that_differ():
    sharp_but_alike = np.eye(4)[[2, 2, 2, 2]]
    even = np.full((4, 4), 0.25)
    half = np.kron(np.eye(2), np.full((2, 2), 0.5))
    assert [mutual_information(one) for one in (sharp_but_alike, even, half, np.eye(4))] == [0, 0, 1, 2]


def test_unknown_words_are_labeled_with_their_text(transformer):
    assert look(transformer, "one zebra", "un").source_pieces == ["one", "zebra"]


def count_colors(png: bytes) -> int:
    pixels = imread(BytesIO(png), format="png")
    assert min(pixels.shape[:2]) > 200
    return len(np.unique(pixels[..., 0]))


@pytest.mark.parametrize("options", [{}, {"attention": "decoder.0.attention", "head": 1}, {"overview": True}])
def test_plots_are_not_blank(seen, tmp_path, options):
    seen.save(tmp_path / "map.png", **options)
    assert count_colors((tmp_path / "map.png").read_bytes()) > 50
    seen.save(tmp_path / "map.svg", **options)
    texts = "".join(xml.parse(tmp_path / "map.svg").getroot().itertext())
    assert "trois" in texts
    assert "head" in texts


def test_attention_all_is_the_overview(seen, tmp_path):
    seen.save(tmp_path / "a.svg", overview=True)
    seen.save(tmp_path / "b.svg", "all")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_notebook_plot_is_a_png(seen):
    assert seen._repr_png_().startswith(b"\x89PNG")


def test_plots_leave_matplotlib_settings_unchanged(seen, tmp_path):
    before = dict(matplotlib.rcParams)
    seen.save(tmp_path / "map.png")
    assert dict(matplotlib.rcParams) == before


def test_plots_as_pdf(seen, tmp_path):
    """The same bytes each time, as of the other formats."""
    for name in ("a.pdf", "b.pdf"):
        seen.save(tmp_path / name, overview=True)
    assert (tmp_path / "a.pdf").read_bytes() == (tmp_path / "b.pdf").read_bytes()
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_a_map_is_an_array(seen):
    cross = seen.maps["decoder.0.cross"]
    np.testing.assert_array_equal(np.asarray(cross), cross.weights)
    assert np.asarray(cross, dtype=np.float64).dtype == np.float64
    assert np.array(cross) is not cross.weights


def test_a_list_of_texts_gives_a_list_of_looks(transformer):
    first, second = look(transformer, ["one two", "three"], ["deux un", "trois"], layers="*.cross")
    assert (first.translation, second.source, list(second.maps)) == (
        "deux un",
        "three",
        ["decoder.0.cross", "decoder.1.cross"],
    )
    assert [one.source for one in look(transformer, ("one", "two"))] == ["one", "two"]
    assert look(transformer, []) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda model: look(model.model, "one"),
            r"needs a model with its tokenizers \(got Transformer\).*not its .model",
        ),
        (lambda model: look("folder", "one"), r"tokenizers \(got str\). Pass the pipeline that regard.load"),
        (lambda model: look(model, 3), r"look needs a text \(got 3\)"),
        (lambda model: look(model, ["one", "two"], "un"), "A list of 2 sources needs as many targets"),
        (lambda model: look(model, ["one", "two"], ["un"]), "A list of 2 sources needs as many targets"),
        (lambda model: look(model, ["one"], ["un"], gold=[(0, 0)]), "no gold links. Look at one source at a time"),
    ],
)
def test_other_arguments_of_look_raise_errors(transformer, call, message):
    with pytest.raises(RegardError, match=message):
        call(transformer)


def test_a_pickled_look_has_its_arrays_and_no_model(transformer, tmp_path):
    seen = look(transformer, SENTENCE)
    content = pickle.dumps(seen)
    assert b"pipelines" not in content.replace(b"regard.pipelines.translation", b"")
    loaded = pickle.loads(content)
    np.testing.assert_array_equal(loaded.maps["decoder.1.cross"], seen.maps["decoder.1.cross"])
    assert (repr(loaded), loaded.search_tree) == (repr(seen), None)
    for name in ("a.png", "page.html"):
        loaded.save(tmp_path / name)
    for explain in (loaded.head_effects, loaded.logit_lens, loaded.attribution, loaded.rollout):
        with pytest.raises(RegardError, match=r"This look has no model\. Create it with regard\.look"):
            explain()
    assert seen.pipeline is transformer


def test_any_script_and_symbol_can_be_plotted(transformer, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = look(transformer, "$x_1$ 猫 مرحبا नमस्ते \\frac <eos> $", "un $")
        seen.save(tmp_path / "map.png")
        seen.save(tmp_path / "map.svg")
        seen.save(tmp_path / "all.png", overview=True)
    assert "猫" in (tmp_path / "map.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda seen, at: seen.save(at / "map.html2"), "pages are .html, plots are .png, .svg or .pdf"),
        (
            lambda seen, at: seen.save(at / "map.png", "decoder.9.cross"),
            "no attention 'decoder.9.cross'.*decoder.1.cross",
        ),
        (lambda seen, at: seen.save(at / "map.png", "decoder.0.cross", head=2), "no head 2. Choose a head from 0 to 1"),
    ],
)
def test_invalid_arguments_of_save_raise_errors(seen, tmp_path, call, message):
    with pytest.raises(RegardError, match=message):
        call(seen, tmp_path)
    assert not list(tmp_path.iterdir())


def test_page_of_a_model_without_attention_has_its_states(blind, tmp_path):
    seen = look(blind, SENTENCE)
    assert seen.maps == {}
    header = build_scene(seen).header
    assert header["attentions"] == []
    titles = [step["title"] for step in header["trace"]["steps"]]
    assert "Initial state of the decoder: the source as one vector" in titles
    assert max(step["differs"] or 0.0 for step in header["trace"]["steps"]) < 1e-5
    with pytest.raises(RegardError, match=r"no attention map.*\.html"):
        seen.save(tmp_path / "map.png")
    seen.save(tmp_path / "page.html", with_model=False)


@pytest.fixture(scope="module")
def question_answerer():
    tokenizer = Tokenizer.train(["the cat chased the mouse who did it ?"], "word")
    torch.manual_seed(0)
    sizes = dict(width=16, heads=2, layers=2, feedforward=32, vocab=tokenizer.vocab_size, segments=2)
    model = Bert(BertConfig(**sizes, head="answer")).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return TextEncoder(model, tokenizer)


def test_look_at_a_question_and_its_context(question_answerer, tmp_path):
    question, context = "who chased it ?", "the cat chased the mouse"
    seen = look(question_answerer, question, context=context)
    assert seen.translation == question_answerer.answer(Question("", question, context))
    (one, *_) = seen.maps.values()
    rows, columns = seen.question
    assert [one.rows[i] for i in rows] == question.split()
    assert [one.columns[i] for i in columns] == context.split()
    # The model reads both, each with its segment.
    encoded = question_answerer.encode_rows([(question, context)])
    with torch.no_grad(), record(question_answerer.model) as recording:
        question_answerer.model(
            question_answerer.pack([encoded.ids[0].tolist()]), torch.from_numpy(encoded.segments[0])
        )
    np.testing.assert_allclose(one.weights, recording[one.name].weights()[0], atol=1e-6)
    best = seen.alignment
    assert mutual_information(seen.question_block(best.head_weights())) == max(
        mutual_information(seen.question_block(m.head_weights())) for m in seen.maps.values()
    )
    header = build_scene(seen).header
    assert header["initial"]["attention"] == best.name
    assert max(step["differs"] or 0.0 for step in header["trace"]["steps"]) < 1e-5
    seen.save(tmp_path / "map.png")


def test_invalid_contexts_raise_errors(question_answerer, transformer):
    with pytest.raises(RegardError, match="Only a question-answering model"):
        look(transformer, SENTENCE, context="one")
    with pytest.raises(RegardError, match="context is empty"):
        look(question_answerer, "who ?", context=" ")


@pytest.mark.parametrize(("text", "message"), [(" ", "empty"), ("one " * 99, "99 tokens")])
def test_empty_and_too_long_texts_raise_errors(transformer, text, message, monkeypatch):
    monkeypatch.setattr(TextPipeline, "length_limit", 16)  # as with learned positions
    with pytest.raises(RegardError, match=message):
        look(transformer, text)


def test_long_texts_can_be_truncated(transformer):
    assert len(look(transformer, "one " * 99, truncate=True).source_pieces) == 15


def test_look_leaves_the_model_unchanged(transformer):
    before = transformer.score([(SENTENCE, TRANSLATION)])
    look(transformer, SENTENCE)
    assert transformer.score([(SENTENCE, TRANSLATION)]) == before
    assert not torch.is_inference_mode_enabled()


def test_ids_beyond_the_tokenizer_are_shown_as_numbers():
    """Models often have more rows than their tokenizer has entries."""
    tokenizer = Tokenizer.train(["one two three"], "word")
    torch.manual_seed(0)
    config = GPTConfig(width=8, heads=2, layers=1, feedforward=8, vocab=tokenizer.vocab_size + 40, max_len=16)
    generator = TextGenerator(GPT(config).eval(), tokenizer)
    scene = build_scene(look(generator, "one two"))
    assert any(f"<{token}>" in str(scene) for token in range(tokenizer.vocab_size, config.vocab))
    tree = record_search(generator, "one two", DecodeConfig(method="greedy", max_len=3))
    assert any(node.token == f"<{node.id}>" for node in tree.nodes)


@pytest.mark.parametrize("form", ["transformer", "luong", "answer"])
def test_plot_of_a_long_text_groups_tokens(form, tmp_path, monkeypatch):
    seen = text_models.cached_look(form)
    shown = seen.alignment
    T, S = len(shown.rows), len(shown.columns)
    monkeypatch.setattr(text_look, "SAMPLE_ROWS", 2)
    weights, rows, columns, note = shown.grouped_weights(2)
    t, s = (math.ceil(length / 2) for length in (T, S))
    assert f"mean of {t} rows, sum of {s} columns" in note
    for i, j in itertools.product(range(len(rows)), range(len(columns))):
        exact = shown.weights[:, i * t : (i + 1) * t, j * s : (j + 1) * s].sum(2).mean(1)
        np.testing.assert_allclose(weights[:, i, j], exact, atol=1e-6)
    assert rows == [f"{shown.rows[0]} …", f"{shown.rows[t]} …"]
    part = shown.grouped_weights(1, range(1, T), range(2, S)).weights
    np.testing.assert_allclose(part[:, 0, 0], shown.weights[:, 1:, 2:].sum(2).mean(1), atol=1e-6)
    for name in ("MAX_LABELS", "MAX_SMALL_LABELS"):
        monkeypatch.setattr(plots, name, 2)
    seen.save(tmp_path / "map.svg")
    assert "sum of" in (tmp_path / "map.svg").read_text()
    for overview in (False, True):
        seen.save(tmp_path / "map.svg", overview=overview)
        assert f">{shown.rows[1]}<" not in (tmp_path / "map.svg").read_text()
