"""Texts, and sentencepiece models of every kind, that the tests of tokenisers share."""

import io
import random
from functools import cache
from pathlib import Path

import sentencepiece
import tokenizers

from regard.data import Tokenizer, phrasebook_pairs
from regard.data.text.tokenizer import FOREIGN
from regard.interop.sentencepiece_files import CONTROL, UNKNOWN, Piece


def phrases(split: str, count: int) -> list[str]:
    return [side for pair in phrasebook_pairs(split, count) for side in (pair.source, pair.target)]


TEXTS = phrases("train", 600)
ODD = [
    *("", " ", "   ", " x", "x ", "  the  cat   sat ", "tab\there\nand\r\nthere", "a\u00a0b\u3000c", "x" * 60),
    *("☃ ☃☃ the", "🙂 👩‍👩‍👧 e", "日本 語", "e\u0301te\u0301", "o\u0302\u0301", "한글 \u1112\u1161\u11ab", "ｶﾞｷﾞ"),
    *("ﬁn Ⅷ ①²", "ＡＢＣ", "l’homme d'été", "1,000.50", "---- --", "((the))", "\u200bthe\u200ccat"),
    *("▁", "▁the ▁cat▁", "a▁", "the ▁▁"),
]


def rubbish(count: int) -> list[str]:
    draw = random.Random(7)
    return ["".join(draw.choices("aehstéà '’.,-/▁  ☃🙂ﬁ\tLT", k=draw.randint(1, 25))) for _ in range(count)]


SENTENCES = [*phrases("test", 60), *ODD, *rubbish(200)]
# Texts without what transformers itself makes something else of than sentencepiece does.
PLAIN = [*phrases("test", 60), "", "The   café ", "n'est-ce pas ?", "☃☃ the ☃", "1,000.50 & more", "日本 語 🙂"]


@cache
def trained(**options) -> bytes:
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=file,
        minloglevel=2,
        num_threads=1,
        **{"vocab_size": 800 if options.get("byte_fallback") else 500} | options,
    )
    return file.getvalue()


def theirs(content: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=content)


def ids_of(library: tokenizers.Tokenizer, text: str) -> list[int]:
    return Tokenizer(library, FOREIGN).encode(text)


def written(folder: Path, content: bytes, name: str = "some.model") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


MODELS = {
    "unigram": dict(model_type="unigram"),
    "bpe": dict(model_type="bpe"),
    "unigram bytes": dict(model_type="unigram", byte_fallback=True),
    "bpe bytes": dict(model_type="bpe", byte_fallback=True),
    "bpe of llama": dict(
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False
    ),
    "unigram folded": dict(model_type="unigram", normalization_rule_name="nmt_nfkc_cf"),
    "unigram over spaces": dict(model_type="unigram", split_by_whitespace=False),
    "bpe of spaces": dict(
        **dict(model_type="bpe", allow_whitespace_only_pieces=True, remove_extra_whitespaces=False),
        **dict(normalization_rule_name="identity"),
    ),
    "unigram bare": dict(model_type="unigram", add_dummy_prefix=False, normalization_rule_name="identity"),
    "unigram defined": dict(
        **dict(model_type="unigram", user_defined_symbols="the,(,▁▁", control_symbols="<c>"),
        **dict(normalization_rule_name="identity", remove_extra_whitespaces=False),
    ),
    "bpe defined": dict(model_type="bpe", user_defined_symbols="the,(,((,é|", control_symbols="<c>"),
}
NAMES = ["<s>", "</s> x", "a<unk>b", "<c> <c>", "<0x41> <0x0A>"]
# What a sound file holds at least.
SOUND = [Piece("<unk>", 0, UNKNOWN), Piece("<s>", 0, CONTROL), Piece("▁", -9), Piece("a", -8), Piece("b", -7)]
