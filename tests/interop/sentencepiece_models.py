"""Texts and sentencepiece models for the tests of tokenizers."""

import io
import random
from functools import cache
from pathlib import Path

import sentencepiece
import tokenizers

from regard.data import Tokenizer, read_pairs
from regard.data.text.tokenizer import FOREIGN_KIND
from regard.interop.sentencepiece_files import CONTROL, UNKNOWN, Piece


def phrases(part: str, count: int) -> list[str]:
    return [side for pair in read_pairs([part])[:count] for side in pair]


TEXTS = phrases("phrasebook", 600)
UNUSUAL_TEXTS = [
    *("", " ", "   ", " x", "x ", "  the  cat   sat ", "tab\there\nand\r\nthere", "a\u00a0b\u3000c", "x" * 60),
    *("☃ ☃☃ the", "🙂 👩‍👩‍👧 e", "日本 語", "e\u0301te\u0301", "o\u0302\u0301", "한글 \u1112\u1161\u11ab", "ｶﾞｷﾞ"),
    *("ﬁn Ⅷ ①²", "ＡＢＣ", "l’homme d'été", "1,000.50", "---- --", "((the))", "\u200bthe\u200ccat"),
    *("▁", "▁the ▁cat▁", "a▁", "the ▁▁"),
]


def random_texts(count: int) -> list[str]:
    rng = random.Random(7)
    return ["".join(rng.choices("aehstéà '’.,-/▁  ☃🙂ﬁ\tLT", k=rng.randint(1, 25))) for _ in range(count)]


SENTENCES = [*phrases("phrasebook:test", 60), *UNUSUAL_TEXTS, *random_texts(200)]
# Texts for which transformers and sentencepiece agree.
PLAIN_TEXTS = [
    *phrases("phrasebook:test", 60),
    "",
    "The   café ",
    "n'est-ce pas ?",
    "☃☃ the ☃",
    "1,000.50 & more",
    "日本 語 🙂",
]


@cache
def train_sentencepiece(**options) -> bytes:
    """The content of a trained sentencepiece file."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=file,
        minloglevel=2,
        num_threads=1,
        **{"vocab_size": 800 if options.get("byte_fallback") else 500} | options,
    )
    return file.getvalue()


def load_sentencepiece(content: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=content)


def ids_of(library: tokenizers.Tokenizer, text: str) -> list[int]:
    return Tokenizer(library, FOREIGN_KIND).encode(text)


def write_file(folder: Path, content: bytes, name: str = "some.model") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


MODELS = {
    "unigram": dict(model_type="unigram"),
    "bpe": dict(model_type="bpe"),
    "unigram bytes": dict(model_type="unigram", byte_fallback=True),
    "bpe bytes": dict(model_type="bpe", byte_fallback=True),
    "bpe llama": dict(
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False
    ),
    "unigram casefolded": dict(model_type="unigram", normalization_rule_name="nmt_nfkc_cf"),
    "unigram across spaces": dict(model_type="unigram", split_by_whitespace=False),
    "bpe whitespace pieces": dict(
        **dict(model_type="bpe", allow_whitespace_only_pieces=True, remove_extra_whitespaces=False),
        **dict(normalization_rule_name="identity"),
    ),
    "unigram without prefix": dict(model_type="unigram", add_dummy_prefix=False, normalization_rule_name="identity"),
    "unigram user-defined": dict(
        **dict(model_type="unigram", user_defined_symbols="the,(,▁▁", control_symbols="<c>"),
        **dict(normalization_rule_name="identity", remove_extra_whitespaces=False),
    ),
    "bpe user-defined": dict(model_type="bpe", user_defined_symbols="the,(,((,é|", control_symbols="<c>"),
}
SPECIAL_NAMES = ["<s>", "</s> x", "a<unk>b", "<c> <c>", "<0x41> <0x0A>"]
# The pieces of a minimal valid file.
VALID_PIECES = [Piece("<unk>", 0, UNKNOWN), Piece("<s>", 0, CONTROL), Piece("▁", -9), Piece("a", -8), Piece("b", -7)]
