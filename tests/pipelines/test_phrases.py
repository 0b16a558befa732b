"""Required and forbidden phrases of translators and language models, checked in the text of their outputs."""

import random
import re

import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from regard.data import Tokenizer
from regard.decode import DecodeConfig, TokenTexts
from regard.errors import RegardError
from regard.models import GPT, GPTConfig, TransformerConfig, make_model
from regard.pipelines import TextGenerator, Translator

LINES = [
    "the green tree sleeps in the greenhouse .",
    "a cat , l'homme et le catalogue",
    "cats' house is green - a t-shirt",
    "grüner Baum im Haus am Hausbaum",
    "the trees and a tree",
]
WORDS = ["the", "green", "tree", "cat", "homme", "a", "house", "grüner", "Baum", "Haus"]
PHRASES = [*WORDS, "green tree", "a cat", "grüner Baum im Haus", "l'homme", "le catalogue", "a", "."]
KINDS = ("word", "space", "bpe", "char", "bytes")


def make_tokenizer(kind: str) -> Tokenizer:
    lines = LINES + ([" ".join(WORDS)] if kind in ("word", "space") else [])
    return Tokenizer.train(lines * 3, kind, vocab_size=310 if kind == "bytes" else 90)


def make_translator(kind: str, seed: int, scale: float = 4.0) -> Translator:
    """A model with random weights, large enough for diverse outputs."""
    tokenizer = make_tokenizer(kind)
    torch.manual_seed(seed)
    sizes = dict(width=16, heads=2, feedforward=32, encoder_layers=1, decoder_layers=1, max_len=64)
    vocab = dict(source_vocab=tokenizer.vocab_size, target_vocab=tokenizer.vocab_size)
    model = make_model(TransformerConfig(**sizes, **vocab)).eval()
    with torch.no_grad():
        model.output.weight.normal_(std=scale)
    return Translator(model, tokenizer, tokenizer)


def contains(text: str, phrase: str, kind: str) -> bool:
    """Whether a text contains a phrase as whole words: independent of the implementation."""
    word = r"\S" if kind == "space" else r"(?:[^\W_]|[\u0300-\u036f])"  # letters, digits and combining marks
    before = f"(?<!{word})" if re.match(word, phrase[0]) else ""
    after = f"(?!{word})" if re.match(word, phrase[-1]) else ""
    return re.search(f"{before}{re.escape(phrase)}{after}", text) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_texts_contain_required_and_no_forbidden_phrases(kind):
    draw = random.Random(7)
    lines = ["the tree", "a cat in the house", "green"]
    phrases = PHRASES if kind != "space" else [*WORDS, "green tree", "a cat"]
    for seed in range(6):
        translator = make_translator(kind, seed)
        required = [draw.sample(phrases, draw.randint(0, 2)) for _ in lines]
        forbidden = [
            draw.sample([p for p in phrases if not any(contains(r, p, kind) for r in rs)], 3) for rs in required
        ]
        width = draw.choice([1, 3])
        config = DecodeConfig(beam=width, n_best=width, max_len=draw.choice([30, 60]), max_extra=60)
        results = translator.translate(lines, config, required=required, forbidden=forbidden)
        for n_best, line_required, line_forbidden in zip(results, required, forbidden):
            assert n_best
            for one in n_best:
                assert all(contains(one.text, phrase, kind) for phrase in line_required), one.text
                assert not any(contains(one.text, phrase, kind) for phrase in line_forbidden), one.text
        for method in ("greedy", "sample"):
            config = DecodeConfig(method, n_best=1 if method == "greedy" else 3, max_len=25, temperature=2.0)
            for n_best, line_forbidden in zip(translator.translate(lines, config, forbidden=forbidden), forbidden):
                for one in n_best:
                    assert not any(contains(one.text, phrase, kind) for phrase in line_forbidden), one.text


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_tokens_are_those_of_the_decoder(kind):
    tokenizer = make_tokenizer(kind)
    texts = TokenTexts.from_tokenizer(tokenizer, tokenizer.vocab_size + 2)
    assert len(texts.texts) == tokenizer.vocab_size + 2
    draw = random.Random(3)
    for _ in range(50):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(12)]
        text = b"".join(texts.texts[i] for i in ids).decode(errors="replace")
        expected = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
        assert text.lstrip() == expected.lstrip()
    for line in LINES:
        assert any(b"".join(texts.texts[i] for i in ids).strip() for ids in texts.canonical(texts.normalize(line)))


def test_texts_of_tokens_of_other_tokenizers():
    pieces = ["<unk>", "▁the", "▁cat", "s", "<0xC3>", "<0xA9>", "▁", "."]
    library = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens(["<unk>"])
    texts = TokenTexts.from_tokenizer(Tokenizer(library, "foreign"), 8)
    assert texts.texts == [b"", b" the", b" cat", b"s", b"\xc3", b"\xa9", b" ", b"."]
    wordpiece = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "cat": 1, "##s": 2}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    wordpiece.add_special_tokens(["[UNK]"])
    assert TokenTexts.from_tokenizer(Tokenizer(wordpiece, "foreign"), 3).texts == [b"", b" cat", b"s"]
    gpt2 = Tokenizer.train(LINES, "bytes", vocab_size=300).backend_tokenizer
    foreign = TokenTexts.from_tokenizer(Tokenizer(gpt2, "foreign"), 300)
    assert b"".join(foreign.texts[i] for i in Tokenizer(gpt2, "foreign").encode("grüner")) == "grüner".encode()


def test_lowercase_tokenizer_normalizes_phrases():
    tokenizer = Tokenizer.train(LINES * 3, "bpe", 90, lowercase=True)
    torch.manual_seed(0)
    sizes = dict(width=16, heads=2, feedforward=32, encoder_layers=1, decoder_layers=1)
    model = make_model(TransformerConfig(**sizes, source_vocab=90, target_vocab=90)).eval()
    (best,) = Translator(model, tokenizer, tokenizer).translate("the tree", required=["Grüner  Baum"])
    assert contains(best.text, "grüner baum", "bpe")


def test_forbidden_word_may_be_part_of_a_longer_word(seq2seq):
    assert seq2seq("one two") == "deux un"
    (best,) = seq2seq.translate("one two", forbidden=["deu"])
    assert best.text == "deux un"
    (best,) = seq2seq.translate("one two", forbidden=["deux"])
    assert "deux" not in best.text
    (best,) = seq2seq.translate("one two", DecodeConfig("greedy"), forbidden=["deux"])
    assert "deux" not in best.text


def test_phrases_per_line_or_for_all_lines(seq2seq):
    lines = ["one two", "", "three"]
    per_line = seq2seq.translate(lines, required=[["neuf"], [], ["sept huit", "six"]])
    texts = [n_best[0].text for n_best in per_line]
    assert "neuf" in texts[0].split()
    assert texts[1] == ""
    assert "sept huit" in texts[2]
    assert "six" in texts[2].split()
    for_all = seq2seq.translate(lines, required=["neuf"], forbidden=["un"])
    assert [("neuf" in n_best[0].text.split(), "un" in n_best[0].text.split()) for n_best in for_all] == [
        (True, False),
        (False, False),  # an empty line stays empty
        (True, False),
    ]
    assert seq2seq.translate("one two", required=["neuf"]) == seq2seq.translate(["one two"], required=[["neuf"]])[0]
    assert seq2seq.translate(lines, required=[[], [], []], forbidden=[]) == seq2seq.translate(lines)
    config = DecodeConfig(beam=4, n_best=3, coverage_penalty=0.2)
    (three,) = seq2seq.translate(["one two"], config, required=["neuf"], prefixes=["dix"], history=True)
    assert [one.text.split()[0] for one in three] == ["dix"] * 3
    assert all("neuf" in one.text.split() for one in three)
    assert three[0].history.path(three[0].hypothesis)


def test_line_with_required_phrase_is_not_split(seq2seq):
    line = "one two. 3 four"
    assert seq2seq.translate(line, split="auto", required=["neuf"])[0].text.split().count("neuf") >= 1
    with pytest.raises(RegardError, match=r"^split='always' translates sentences separately"):
        seq2seq.translate(line, split="always", required=["neuf"])
    assert "deux" not in seq2seq.translate(line, split="always", forbidden=["deux"])[0].text.split()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"required": [[], ["un", "grün"]]},
            r"^line 2: The required phrase 'grün' cannot be generated: .* lacks 'grün'",
        ),
        ({"required": ["un", " "]}, r"^line 1: A required phrase is empty: ' '"),
        (
            {"required": ["un deux"], "forbidden": ["un"]},
            r"^line 1: The required phrase 'un deux' contains a forbidden",
        ),
        ({"required": "un"}, r"^required must be a list of phrases \(got 'un'\)\. Pass required="),
        ({"forbidden": [["un"]]}, r"one list of forbidden phrases per line: got 1 lists for 2 lines"),
        ({"forbidden": ["un", ["deux"]]}, r"^forbidden mixes phrases and lists"),
        ({"forbidden": [[3], []]}, r"^forbidden must contain strings \(got \[3\]\)"),
        ({"forbidden": [3, 4]}, r"^forbidden must be a list of phrases"),
        ({"required": ["un"], "config": DecodeConfig("greedy")}, "Required phrases need beam search"),
        ({"required": ["un"] * 40}, r"need 40 tokens; the maximum output length leaves"),
    ],
)
def test_invalid_phrases_raise(seq2seq, options, message):
    with pytest.raises(RegardError, match=message):
        seq2seq.translate(["one", "two"], **options)


def test_unknown_word_can_be_forbidden(seq2seq):
    assert seq2seq.translate("one two", forbidden=["grün"])[0].text == "deux un"


@pytest.mark.parametrize("kind", KINDS)
def test_language_model_phrases(kind):
    tokenizer = make_tokenizer(kind)
    for seed in range(5):
        torch.manual_seed(seed)
        sizes = dict(width=16, heads=2, layers=1, feedforward=16, vocab=tokenizer.vocab_size, max_len=64)
        generator = TextGenerator(GPT(GPTConfig(**sizes)).eval(), tokenizer)
        for prompt in ("the green", "the"):
            config = DecodeConfig("sample", n_best=4, seed=seed, max_len=12, temperature=1.5)
            for one in generator.generate(prompt, config, forbidden=["green tree", "a"]):
                assert not contains(prompt + one.text, "green tree", kind)
                assert not contains(prompt[-1] + one.text, "a", kind)
            config = DecodeConfig("beam", beam=2, n_best=2, max_len=20)
            for one in generator.generate([prompt], config, required=["tree", "a cat"], forbidden=["the"])[0]:
                text = prompt[-1] + one.text  # the first letters may continue a word
                assert contains(text, "tree", kind)
                assert contains(text, "a cat", kind)
                assert not contains(text, "the", kind)
    with pytest.raises(RegardError, match=r"^Required phrases need beam search \(got method sample\)"):
        generator.generate("the", required=["tree"])
    pieces = []
    (one,) = generator.generate("the", forbidden=["tree"], on_text=lambda _, text: pieces.append(text))
    assert "".join(pieces) == one.text
