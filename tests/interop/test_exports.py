"""Models of ours in CTranslate2 and in ONNX Runtime: the same numbers, the same translations."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import pre_tokenizers

from regard.data import Tokenizer
from regard.data.questions import Question
from regard.data.special import Special
from regard.data.tokenizer import FOREIGN
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.folder import ImageModel, LanguageModel, TextEncoder, Translator
from regard.interop.ctranslate import export_ctranslate2
from regard.interop.huggingface import export_folder
from regard.interop.onnx_export import export_onnx
from regard.interop.onnx_runner import open_onnx
from regard.layers.packed import pack
from regard.models import GPT, Bert, ViT
from regard.models.bert import BertConfig
from regard.models.gpt import GPTConfig
from regard.models.transformer import Transformer, TransformerConfig, t5_small
from regard.models.vit import vit_pico
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


def ours(**choices) -> Translator:
    torch.manual_seed(5)
    model = Transformer(TransformerConfig(**(SIZES | choices))).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or "bias" in name:
                tensor.add_(0.3 * torch.randn_like(tensor))
            else:
                tensor.mul_(1.5)  # decided opinions
        model.output.weight[3] *= 2  # and texts that end
    tokenizer = Tokenizer.train([" ".join(f"w{i}" for i in range(46))], "word")
    return Translator(model, tokenizer, tokenizer)


def logprobs(translator: Translator) -> torch.Tensor:
    with torch.no_grad():
        return translator.model(pack(SOURCES), pack(TARGETS)).log_softmax(-1)


# -- CTranslate2 ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ctranslate2() -> Any:
    """The library, opened where a test asks for it."""
    import ctranslate2

    return ctranslate2


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_ctranslate2_gives_each_token_the_same_probability(ctranslate2, tmp_path, form):
    translator = ours(**form)
    export_ctranslate2(translator, tmp_path)
    runner = ctranslate2.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    names = [translator.target_tokenizer.library.id_to_token(i) for i in range(VOCAB)]
    sources, targets = ([[names[i] for i in row] for row in rows] for rows in (SOURCES, TARGETS))
    scores = runner.score_batch([row[:-1] for row in sources], [row[1:] for row in targets])  # ends are added there
    wanted = logprobs(translator).split([len(row) for row in TARGETS])
    for own, row, other in zip(wanted, TARGETS, scores):
        price = own.gather(1, torch.tensor([*row[1:], 3])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(other.log_probs), price, atol=1e-4, rtol=0)
    # And step by step.
    words = [[f"w{(7 * i + 5 * j) % 46}" for j in range(1 + i % 4)] for i in range(12)]
    found = translator.translate([" ".join(row) for row in words], DecodeConfig("greedy", max_len=18))
    told = runner.translate_batch([[f"▁{word}" for word in row] for row in words], **like(beam=1, longest=18))
    assert [[names[i] for i in best.hypothesis.ids] for best, *_ in found] == [one.hypotheses[0] for one in told]
    assert max(len(best.hypothesis.ids) for best, *_ in found) > 3


def like(beam: int, longest: int) -> dict[str, Any]:
    """The options of CTranslate2 that search as ours do."""
    lengths = dict(min_decoding_length=0, max_decoding_length=longest)
    return dict(beam_size=beam, suppress_sequences=[["<pad>"], ["<sos>"]], **lengths)


@pytest.mark.parametrize("choices", [None, {"positions": "rotary", "kv_heads": 1, "norm": "post"}])
def test_ctranslate2_translates_as_we_do(ctranslate2, transformer, tmp_path, choices):
    if choices is not None:
        small = TransformerConfig(width=32, heads=4, feedforward=64, encoder_layers=1, decoder_layers=1, **choices)
        transformer = train_numbers(small, steps=40)
    export_ctranslate2(transformer, tmp_path)
    runner = ctranslate2.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    lines = [source for source, _ in number_pairs(100, seed=7)]
    tokenizer = transformer.source_tokenizer.library
    pieces = [tokenizer.encode(line, add_special_tokens=False).tokens for line in lines]
    told = [one.hypotheses[0] for one in runner.translate_batch(pieces, **like(beam=5, longest=16))]
    found = [best.text for best, *_ in transformer.translate(lines, DecodeConfig(beam=5))]
    assert [tokenizer.decode([tokenizer.token_to_id(piece) for piece in one]) for one in told] == found
    assert len(set(found)) > 20
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
        pairs = [(translator.source_ids(a), translator.target_ids(b)) for a, b in zip(*rows)]
        wanted = torch.tensor([i for _, ids in pairs for i in (*ids, translator.special.eos)])
        torch.nn.functional.cross_entropy(model(*translator.teacher_forced(pairs)), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return translator


LINES = [source for source, _ in number_pairs(100, seed=7)]


def test_default_form_translates_identically_in_ctranslate2(ctranslate2, two_vocabularies, tmp_path):
    export_ctranslate2(two_vocabularies, tmp_path)
    runner = ctranslate2.Translator(str(tmp_path), compute_type="float32", intra_threads=1)
    source, target = (one.library for one in two_vocabularies.tokenizers)
    pieces = [source.encode(line, add_special_tokens=False).tokens for line in LINES]
    told = runner.translate_batch(pieces, **like(beam=5, longest=16))
    found = [target.decode([target.token_to_id(piece) for piece in one.hypotheses[0]]) for one in told]
    assert found == translations(two_vocabularies)


def test_default_form_translates_identically_in_onnx(two_vocabularies, tmp_path):
    export_onnx(two_vocabularies, tmp_path)
    assert translations(open_onnx(tmp_path)) == translations(two_vocabularies)


def test_default_form_translates_identically_in_transformers(transformers, two_vocabularies, tmp_path):
    if two_vocabularies.model.config.positions == "rotary":
        with pytest.raises(RegardError, match="train with --for huggingface"):
            export_folder(two_vocabularies, tmp_path)
        return
    export_folder(two_vocabularies, tmp_path)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    given = tokenizer(LINES, return_tensors="pt", padding=True)
    written = model.generate(**given, max_length=17, forced_eos_token_id=None)
    assert tokenizer.batch_decode(written, skip_special_tokens=True) == translations(two_vocabularies)


def translations(translator: Translator) -> list[str]:
    found = [best.text for best, *_ in translator.translate(LINES, DecodeConfig(beam=5, max_len=16, max_extra=16))]
    assert len(set(found)) > 20
    return found


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ({"qk_norm": True}, r"qk_norm = True \(supported: False\)"),
        ({"activation": "relu2"}, "activation = 'relu2'"),
        ({"cross_score": "concat"}, r"cross_score = 'concat' \(supported: 'scaled_dot' or 'dot'\)"),
    ],
)
def test_what_ctranslate2_cannot_compute_is_refused(ctranslate2, tmp_path, choices, told):
    with pytest.raises(RegardError, match=told):
        export_ctranslate2(ours(**choices), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ctranslate2_frames_sources_as_the_model_wants(ctranslate2, tmp_path):
    """A beginning as well as an end, another start, more ids than the tokenizer has."""
    translator = ours(source_vocab=VOCAB + 3, target_vocab=VOCAB + 3)
    translator.special = Special(pad=1, unk=0, sos=3, eos=3, begin=2, end=3)
    export_ctranslate2(translator, tmp_path / "out")
    runner = ctranslate2.Translator(str(tmp_path / "out"), compute_type="float32", intra_threads=1)
    (score,) = runner.score_batch([["▁w1", "▁w2"]], [["▁w7"]])
    source, target = translator.teacher_forced([(translator.source_ids("w1 w2"), translator.target_ids("w7"))])
    assert source.ids.tolist()[0] == 2
    price = translator.model(source, target).log_softmax(-1)[[0, 1], [*translator.target_ids("w7"), 3]]
    torch.testing.assert_close(torch.tensor(score.log_probs), price.detach(), atol=1e-4, rtol=0)
    translator.special = Special(end=0)
    with pytest.raises(RegardError, match="ends as a target does"):
        export_ctranslate2(translator, tmp_path / "other")


# -- ONNX Runtime -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [DecodeConfig(beam=5, n_best=3), DecodeConfig("greedy"), DecodeConfig("sample", n_best=2)],
    ids=["beam", "greedy", "sample"],
)
def test_onnx_translates_as_we_do(transformer, tmp_path, config):
    export_onnx(transformer, tmp_path)
    opened = open_onnx(tmp_path)
    lines = ["", *(source for source, _ in number_pairs(100, seed=7))]
    found, wanted = (
        [[one.text for one in answer] for answer in each.translate(lines, config)] for each in (opened, transformer)
    )
    assert found == wanted
    assert len({answer[0] for answer in found}) > 90


def test_onnx_scores_and_knows_prefixes(transformer, tmp_path):
    export_onnx(transformer, tmp_path)
    opened = open_onnx(tmp_path)
    pairs = number_pairs(9, seed=3)
    found, wanted = ([one.logprob for one in each.score(pairs)] for each in (opened, transformer))
    assert found == pytest.approx(wanted, abs=1e-4)
    (best,) = opened.translate(["one two"], prefixes=["dix"])[0]
    assert best.text.startswith("dix")
    assert best.text == transformer.translate(["one two"], prefixes=["dix"])[0][0].text


def test_onnx_keeps_the_languages(tmp_path):
    translator = ours(encoder_layers=1, decoder_layers=1)
    translator.languages = ("en", "fr")
    export_onnx(translator, tmp_path)
    assert open_onnx(tmp_path).languages == ("en", "fr")


def test_onnx_keeps_special_ids_and_two_tokenizers(tmp_path):
    translator = ours(shared_vocab=False, encoder_layers=1, decoder_layers=1)
    translator.target_tokenizer = Tokenizer.train([" ".join(f"v{i}" for i in range(46))], "word")
    export_onnx(translator, tmp_path / "two")
    opened = open_onnx(tmp_path / "two")
    assert (opened.special, opened.tokenizers) == (translator.special, translator.tokenizers)
    translator.special = Special(pad=1, unk=0, sos=3, eos=3, begin=2, end=3, forced=2)
    export_onnx(translator, tmp_path / "other")
    assert open_onnx(tmp_path / "other").special == translator.special


def test_onnx_keeps_another_programs_tokenizer(tmp_path):
    translator = ours(encoder_layers=1, decoder_layers=1)
    library = translator.source_tokenizer.library
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    translator.source_tokenizer = translator.target_tokenizer = Tokenizer(library, FOREIGN)
    export_onnx(translator, tmp_path)
    assert open_onnx(tmp_path).source_ids("w1 w2") == translator.source_ids("w1 w2")


def test_recurrent_translators_as_onnx(seq2seq, tmp_path):
    export_onnx(seq2seq, tmp_path)
    lines = [source for source, _ in number_pairs(20, seed=7)]
    found, wanted = ([best.text for best, *_ in each.translate(lines)] for each in (open_onnx(tmp_path), seq2seq))
    assert found == wanted


def test_language_models_as_onnx(tmp_path):
    tokenizer = Tokenizer.train(["the cat chased the mouse"], "char")
    torch.manual_seed(0)
    config = GPTConfig(width=16, heads=2, layers=1, feedforward=32, vocab=tokenizer.vocab_size)
    writer = LanguageModel(GPT(config).eval(), tokenizer)
    export_onnx(writer, tmp_path)
    opened = open_onnx(tmp_path)
    found, wanted = (
        [best.text for best, *_ in each.generate(["the c", "mou"], DecodeConfig("greedy", max_len=12))]
        for each in (opened, writer)
    )
    assert found == wanted
    assert opened.score("the cat").logprob == pytest.approx(writer.score("the cat").logprob, abs=1e-4)


@pytest.mark.parametrize("head", ["classify", "none", "answer"])
def test_encoders_as_onnx(tmp_path, head):
    tokenizer = Tokenizer.train(["the cat chased the mouse who did it"], "word")
    torch.manual_seed(0)
    labels = ("good", "bad") if head == "classify" else ()
    config = BertConfig(
        **dict(width=16, heads=2, layers=1, feedforward=32, vocab=tokenizer.vocab_size, segments=2),
        **dict(head=head, labels=labels, pooler="tanh" if labels else "none"),
    )
    encoder = TextEncoder(Bert(config).eval(), tokenizer)
    export_onnx(encoder, tmp_path)
    opened = open_onnx(tmp_path)
    texts = ["the cat", "the cat chased the mouse"]
    if head == "classify":
        assert [one.label for one in opened.classify(texts)] == [one.label for one in encoder.classify(texts)]
    elif head == "none":
        np.testing.assert_allclose(opened.embed(texts), encoder.embed(texts), atol=1e-5)
    else:
        asked = Question("1", "who chased", "the cat chased the mouse")
        assert opened.answer(asked) == encoder.answer(asked)


def test_image_models_as_onnx(tmp_path):
    torch.manual_seed(0)
    config = vit_pico(layers=1, image_height=16, image_width=16, labels=("cat", "dog"))
    model = ImageModel(ViT(config).eval())
    export_onnx(model, tmp_path)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8))
    found, wanted = (each.classify([image])[0] for each in (open_onnx(tmp_path), model))
    assert found.label == wanted.label


def test_what_is_there_and_what_is_not(transformer, seq2seq, tmp_path):
    export_onnx(transformer, tmp_path)
    with pytest.raises(RegardError, match="already contains a model"):
        export_onnx(transformer, tmp_path)
    with pytest.raises(RegardError, match="a recurrent model"):
        export_ctranslate2(seq2seq, tmp_path / "out")
    (tmp_path / "decoder_step.onnx").write_bytes(b"no graph")
    with pytest.raises(RegardError, match="not an ONNX graph"):
        open_onnx(tmp_path)
    (tmp_path / "decoder_step.onnx").unlink()
    with pytest.raises(RegardError, match="there is no decoder_step"):
        open_onnx(tmp_path)


@pytest.mark.parametrize(
    ("library", "export", "told"),
    [
        ("ctranslate2", export_ctranslate2, r'pip install "regard\[ctranslate2\]"'),
        ("onnx", export_onnx, r'pip install "regard\[onnx\]"'),
    ],
)
def test_a_missing_library_is_named(monkeypatch, transformer, tmp_path, library, export, told):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RegardError, match=told):
        export(transformer, tmp_path / "out")
    assert not (tmp_path / "out").exists()
