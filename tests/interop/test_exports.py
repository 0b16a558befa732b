"""Exports to CTranslate2 and ONNX: probabilities and translations equal those of Regard."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import pre_tokenizers

from regard.data import Tokenizer
from regard.data.text.languages import LanguagePair
from regard.data.text.questions import Question
from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import FOREIGN_KIND
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.interop.ctranslate2 import export_ctranslate2
from regard.interop.huggingface.folder import export_huggingface
from regard.interop.onnx_export import export_onnx
from regard.interop.onnx_runner import load_onnx
from regard.layers.packed import pack
from regard.models import GPT, Bert, ViT
from regard.models.bert import BertConfig
from regard.models.gpt import GPTConfig
from regard.models.transformer import Transformer, TransformerConfig, t5_small
from regard.models.vit import vit_pico
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator
from tests.conftest import number_pairs, train_numbers

VOCAB = 50
SIZES: dict[str, Any] = dict(
    **dict(width=24, heads=4, feedforward=37, encoder_layers=2, decoder_layers=3, dropout=0.0, max_len=20),
    **dict(source_vocab=VOCAB, target_vocab=VOCAB, shared_vocab=True),
)
FORMS = [
    {},
    {"norm": "post", "activation": "gelu"},
    {"positions": "learned", "activation": "silu"},
    {"positions": "learned", "position_offset": 2, "embedding_norm": True, "norm": "post", "tied": False},
    {"positions": "sinusoidal_halves", "embedding_scale": False, "output_bias": True},
    {"positions": "rotary", "kv_heads": 2},
    {"positions": "none", "norm_eps": 1e-2, "output_scale": True},
    {"norm_kind": "rms", "norm_eps": 1e-6, "activation": "swiglu", "kv_heads": 1},
    {"norm_kind": "rms", "activation": "geglu", "bias": False, "head_width": 8, "positions": "rotary"},
    {"shared_vocab": False, "activation": "gelu_tanh", "decoder_score": "dot", "width": 36},
    {"max_len": 300},
    vars(t5_small(**SIZES, head_width=5, relative_buckets=8, relative_distance=9)),
    vars(t5_small(**SIZES, tied=True, output_scale=True, activation="relu", relative_buckets=7)),
]
SOURCES = [[5, 6, 7, 8, 30, 3], [9, 3], [4, 49, 10, 3]]
TARGETS = [[2, 5, 6, 7], [2], [2, 8, 9, 11, 12, 40]]


def make_translator(**choices) -> Translator:
    torch.manual_seed(5)
    model = Transformer(TransformerConfig(**(SIZES | choices))).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or "bias" in name:
                tensor.add_(0.3 * torch.randn_like(tensor))
            else:
                tensor.mul_(1.5)  # sharper distributions
        model.output.weight[3] *= 2  # so that texts end
    tokenizer = Tokenizer.train([" ".join(f"w{i}" for i in range(46))], "word")
    return Translator(model, tokenizer, tokenizer)


def logprobs(translator: Translator) -> torch.Tensor:
    with torch.no_grad():
        return translator.model(pack(SOURCES), pack(TARGETS)).log_softmax(-1)


# -- CTranslate2 ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ctranslate2() -> Any:
    """The library, imported on first use."""
    import ctranslate2

    return ctranslate2


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_ctranslate2_gives_the_same_token_probabilities(ctranslate2, tmp_path, form):
    translator = make_translator(**form)
    export_ctranslate2(translator, tmp_path)
    runner = ctranslate2.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    names = [translator.target_tokenizer.backend_tokenizer.id_to_token(i) for i in range(VOCAB)]
    sources, targets = ([[names[i] for i in row] for row in rows] for rows in (SOURCES, TARGETS))
    scores = runner.score_batch([row[:-1] for row in sources], [row[1:] for row in targets])  # CTranslate2 adds <eos>
    expected = logprobs(translator).split([len(row) for row in TARGETS])
    for log_probs, row, score in zip(expected, TARGETS, scores):
        token_log_probs = log_probs.gather(1, torch.tensor([*row[1:], 3])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(score.log_probs), token_log_probs, atol=1e-4, rtol=0)
    # Greedy decoding gives the same tokens.
    words = [[f"w{(7 * i + 5 * j) % 46}" for j in range(1 + i % 4)] for i in range(12)]
    expected = translator.translate([" ".join(row) for row in words], DecodeConfig("greedy", max_len=18))
    results = runner.translate_batch(
        [[f"▁{word}" for word in row] for row in words], **search_options(beam=1, max_len=18)
    )
    assert [[names[i] for i in best.hypothesis.ids] for best, *_ in expected] == [
        result.hypotheses[0] for result in results
    ]
    assert max(len(best.hypothesis.ids) for best, *_ in expected) > 3


def search_options(beam: int, max_len: int) -> dict[str, Any]:
    """Options of CTranslate2 for the same search as in Regard."""
    lengths = dict(min_decoding_length=0, max_decoding_length=max_len)
    return dict(beam_size=beam, suppress_sequences=[["<pad>"], ["<sos>"]], **lengths)


@pytest.mark.parametrize("choices", [None, {"positions": "rotary", "kv_heads": 1, "norm": "post"}])
def test_ctranslate2_translates_identically(ctranslate2, transformer, tmp_path, choices):
    if choices is not None:
        small = TransformerConfig(width=32, heads=4, feedforward=64, encoder_layers=1, decoder_layers=1, **choices)
        transformer = train_numbers(small, steps=40)
    export_ctranslate2(transformer, tmp_path)
    runner = ctranslate2.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    lines = [source for source, _ in number_pairs(100, seed=7)]
    tokenizer = transformer.source_tokenizer.backend_tokenizer
    pieces = [tokenizer.encode(line, add_special_tokens=False).tokens for line in lines]
    hypotheses = [
        result.hypotheses[0] for result in runner.translate_batch(pieces, **search_options(beam=5, max_len=16))
    ]
    expected = [best.text for best, *_ in transformer.translate(lines, DecodeConfig(beam=5))]
    assert [tokenizer.decode([tokenizer.token_to_id(piece) for piece in tokens]) for tokens in hypotheses] == expected
    assert len(set(expected)) > 20
    with pytest.raises(RegardError, match="already contains a model"):
        export_ctranslate2(transformer, tmp_path)


DEFAULT_FORMS = [{"positions": "sinusoidal"}, {"positions": "rotary"}]


@pytest.fixture(scope="module", params=DEFAULT_FORMS, ids=str)
def two_vocabularies(request) -> Translator:
    """A translator of the default form (pre-norm, relu, tied output) with two vocabularies, trained for 60 steps."""
    small = dict(width=32, heads=2, feedforward=64, encoder_layers=1, decoder_layers=1, dropout=0.0, max_len=32)
    lists = [list(side) for side in zip(*number_pairs(32 * 60, seed=1))]
    source, target = (Tokenizer.train(texts, "word") for texts in lists)
    vocabularies = dict(source_vocab=source.vocab_size, target_vocab=target.vocab_size)
    torch.manual_seed(3)
    model = Transformer(TransformerConfig(**small, **vocabularies, **request.param))
    translator = Translator(model, source, target)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for start in range(0, len(lists[0]), 32):
        rows = [side[start : start + 32] for side in lists]
        pairs = [(translator.encode_source(a), translator.encode_target(b)) for a, b in zip(*rows)]
        labels = torch.tensor([i for _, ids in pairs for i in (*ids, translator.special.eos)])
        torch.nn.functional.cross_entropy(model(*translator.teacher_forced(pairs)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return translator


LINES = [source for source, _ in number_pairs(100, seed=7)]


def test_default_form_translates_identically_in_ctranslate2(ctranslate2, two_vocabularies, tmp_path):
    export_ctranslate2(two_vocabularies, tmp_path)
    runner = ctranslate2.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    source, target = (tokenizer.backend_tokenizer for tokenizer in two_vocabularies.tokenizers)
    pieces = [source.encode(line, add_special_tokens=False).tokens for line in LINES]
    results = runner.translate_batch(pieces, **search_options(beam=5, max_len=16))
    decoded = [target.decode([target.token_to_id(piece) for piece in result.hypotheses[0]]) for result in results]
    assert decoded == translations(two_vocabularies)


def test_default_form_translates_identically_in_onnx(two_vocabularies, tmp_path):
    export_onnx(two_vocabularies, tmp_path)
    assert translations(load_onnx(tmp_path)) == translations(two_vocabularies)


def test_default_form_translates_identically_in_transformers(transformers, two_vocabularies, tmp_path):
    if two_vocabularies.model.config.positions == "rotary":
        with pytest.raises(RegardError, match="train with --for huggingface"):
            export_huggingface(two_vocabularies, tmp_path)
        return
    export_huggingface(two_vocabularies, tmp_path)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    inputs = tokenizer(LINES, return_tensors="pt", padding=True)
    generated = model.generate(**inputs, max_length=17, forced_eos_token_id=None)
    assert tokenizer.batch_decode(generated, skip_special_tokens=True) == translations(two_vocabularies)


def translations(translator: Translator) -> list[str]:
    texts = [best.text for best, *_ in translator.translate(LINES, DecodeConfig(beam=5, max_len=16, max_extra=16))]
    assert len(set(texts)) > 20
    return texts


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"qk_norm": True}, r"qk_norm = True \(supported: False\)"),
        ({"activation": "relu2"}, "activation = 'relu2'"),
        ({"cross_score": "concat"}, r"cross_score = 'concat' \(supported: 'scaled_dot' or 'dot'\)"),
    ],
)
def test_unsupported_fields_of_ctranslate2_are_named(ctranslate2, tmp_path, choices, message):
    with pytest.raises(RegardError, match=message):
        export_ctranslate2(make_translator(**choices), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ctranslate2_adds_the_special_tokens_of_the_model(ctranslate2, tmp_path):
    """Tokens before and after the source, another start token, more ids than the tokenizer has."""
    translator = make_translator(source_vocab=VOCAB + 3, target_vocab=VOCAB + 3)
    translator.special = SpecialTokens(pad=1, unk=0, sos=3, eos=3, begin=2, end=3)
    export_ctranslate2(translator, tmp_path / "out")
    runner = ctranslate2.Translator(str(tmp_path / "out"), compute_type="float32", intra_threads=1)
    (score,) = runner.score_batch([["▁w1", "▁w2"]], [["▁w7"]])
    source, target = translator.teacher_forced([(translator.encode_source("w1 w2"), translator.encode_target("w7"))])
    assert source.ids.tolist()[0] == 2
    log_probs = translator.model(source, target).log_softmax(-1)[[0, 1], [*translator.encode_target("w7"), 3]]
    torch.testing.assert_close(torch.tensor(score.log_probs), log_probs.detach(), atol=1e-4, rtol=0)
    translator.special = SpecialTokens(end=0)
    with pytest.raises(RegardError, match="CTranslate2 ends a source with the same token as a target"):
        export_ctranslate2(translator, tmp_path / "other")


# -- ONNX Runtime -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def onnx_folder(transformer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    export_onnx(transformer, folder)
    return folder


@pytest.mark.parametrize(
    "config",
    [DecodeConfig(beam=5, n_best=3), DecodeConfig("greedy"), DecodeConfig("sample", n_best=2)],
    ids=["beam", "greedy", "sample"],
)
def test_onnx_translates_identically(transformer, onnx_folder, config):
    loaded = load_onnx(onnx_folder)
    lines = ["", *(source for source, _ in number_pairs(100, seed=7))]
    actual, expected = (
        [[hypothesis.text for hypothesis in n_best] for n_best in each.translate(lines, config)]
        for each in (loaded, transformer)
    )
    assert actual == expected
    assert len({n_best[0] for n_best in actual}) > 90


def test_onnx_scores_and_supports_prefixes(transformer, onnx_folder):
    loaded = load_onnx(onnx_folder)
    pairs = number_pairs(9, seed=3)
    actual, expected = ([score.logprob for score in each.score(pairs)] for each in (loaded, transformer))
    assert actual == pytest.approx(expected, abs=1e-4)
    (best,) = loaded.translate(["one two"], prefixes=["dix"])[0]
    assert best.text.startswith("dix")
    assert best.text == transformer.translate(["one two"], prefixes=["dix"])[0][0].text


def test_onnx_keeps_what_is_beside_the_weights(tmp_path):
    """Special ids, languages, and two tokenizers, of which one is imported; the fingerprint depends on the weights."""
    translator = make_translator(shared_vocab=False, encoder_layers=1, decoder_layers=1)
    translator.special = SpecialTokens(pad=1, unk=0, sos=3, eos=3, begin=2, end=3, forced=2)
    translator.language_pairs = (LanguagePair("en", "fr"),)
    library = translator.source_tokenizer.backend_tokenizer
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    translator.source_tokenizer = Tokenizer(library, FOREIGN_KIND)
    translator.target_tokenizer = Tokenizer.train([" ".join(f"v{i}" for i in range(46))], "word")
    export_onnx(translator, tmp_path / "first")
    loaded = load_onnx(tmp_path / "first")
    assert (loaded.special, loaded.tokenizers) == (translator.special, translator.tokenizers)
    assert loaded.languages == ("en", "fr")
    assert loaded.encode_source("w1 w2") == translator.encode_source("w1 w2")
    with torch.no_grad():
        next(iter(translator.model.parameters())).view(-1)[0] += 1
    export_onnx(translator, tmp_path / "second")
    again, second = (load_onnx(tmp_path / name).fingerprint() for name in ("first", "second"))
    assert loaded.fingerprint() == again != second


def test_recurrent_translators_run_as_onnx(seq2seq, tmp_path):
    export_onnx(seq2seq, tmp_path)
    lines = [source for source, _ in number_pairs(20, seed=7)]
    actual, expected = ([best.text for best, *_ in each.translate(lines)] for each in (load_onnx(tmp_path), seq2seq))
    assert actual == expected


def test_language_models_run_as_onnx(tmp_path):
    tokenizer = Tokenizer.train(["the cat chased the mouse"], "char")
    torch.manual_seed(0)
    config = GPTConfig(width=16, heads=2, layers=1, feedforward=32, vocab=tokenizer.vocab_size)
    language_model = TextGenerator(GPT(config).eval(), tokenizer)
    export_onnx(language_model, tmp_path)
    loaded = load_onnx(tmp_path)
    actual, expected = (
        [best.text for best, *_ in each.generate(["the c", "mou"], DecodeConfig("greedy", max_len=12))]
        for each in (loaded, language_model)
    )
    assert actual == expected
    assert loaded.score("the cat").logprob == pytest.approx(language_model.score("the cat").logprob, abs=1e-4)


@pytest.mark.parametrize("head", ["classify", "none", "answer", "mask"])
def test_encoders_run_as_onnx(tmp_path, head):
    tokenizer = Tokenizer.train(["the cat chased the mouse who did it"], "word", mask=True)
    torch.manual_seed(0)
    labels = ("good", "bad") if head == "classify" else ()
    config = BertConfig(
        **dict(width=16, heads=2, layers=1, feedforward=32, vocab=tokenizer.vocab_size, segments=2),
        **dict(head=head, labels=labels, pooler="tanh" if labels else "none"),
    )
    encoder = TextEncoder(Bert(config).eval(), tokenizer)
    export_onnx(encoder, tmp_path)
    loaded = load_onnx(tmp_path)
    texts = ["the cat", "the cat chased the mouse"]
    np.testing.assert_allclose(loaded.embed(texts), encoder.embed(texts), atol=1e-5)
    if head == "classify":
        for actual, expected in zip(loaded.classify(texts), encoder.classify(texts)):
            assert actual.probabilities == pytest.approx(expected.probabilities, abs=1e-5)
    elif head == "answer":
        question = Question("1", "who chased", "the cat chased the mouse")
        assert loaded.answer(question) == encoder.answer(question)


def test_image_models_run_as_onnx(tmp_path):
    torch.manual_seed(0)
    config = vit_pico(layers=1, image_height=16, image_width=16, labels=("cat", "dog"))
    model = ImageModel(ViT(config).eval())
    export_onnx(model, tmp_path)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8))
    actual, expected = (each.classify([image])[0] for each in (load_onnx(tmp_path), model))
    assert actual.probabilities == pytest.approx(expected.probabilities, abs=1e-4)


def test_existing_models_and_damaged_graphs_are_an_error(transformer, seq2seq, onnx_folder, tmp_path):
    shutil.copytree(onnx_folder, tmp_path, dirs_exist_ok=True)
    with pytest.raises(RegardError, match="already contains a model"):
        export_onnx(transformer, tmp_path)
    with pytest.raises(RegardError, match="does not support recurrent models"):
        export_ctranslate2(seq2seq, tmp_path / "out")
    (tmp_path / "decoder_step.onnx").write_bytes(b"no graph")
    with pytest.raises(RegardError, match="not a valid ONNX graph"):
        load_onnx(tmp_path)
    (tmp_path / "decoder_step.onnx").unlink()
    with pytest.raises(RegardError, match=r"decoder_step.onnx is missing"):
        load_onnx(tmp_path)


@pytest.mark.parametrize(
    ("library", "export", "message"),
    [
        ("ctranslate2", export_ctranslate2, r'-m pip install "ctranslate2>='),
        ("onnx", export_onnx, r'-m pip install "onnx>='),
    ],
)
def test_missing_package_is_named(monkeypatch, transformer, tmp_path, library, export, message):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RegardError, match=message):
        export(transformer, tmp_path / "out")
    assert not (tmp_path / "out").exists()
