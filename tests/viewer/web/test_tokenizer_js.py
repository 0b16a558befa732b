"""The page's tokenizers give the same ids, pieces and texts as those of Python, for every kind and random Unicode."""

import base64
import json
import random
import subprocess

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from regard.data import Tokenizer
from regard.data.text.tokenizer import FOREIGN_KIND, TOKENIZER_KINDS
from regard.interop.sentencepiece_files import read_sentencepiece
from regard.viewer.page.model import tokenizer_header
from tests.interop.sentencepiece_models import MODELS, train_sentencepiece, write_file
from tests.viewer.browser import bundle_script, node_program

SCRIPT = """
import { readFileSync } from "node:fs";
import { PageTokenizer } from "./engine/tokenizer.js";
const cases = JSON.parse(readFileSync("FOLDER/cases.json", "utf-8"));
console.log(JSON.stringify(cases.map(({ tokenizer, texts, rows }) => {
  const one = new PageTokenizer(tokenizer);
  const pieces = (list) => list.map(({ text, start, end }) => [text, [start, end]]);
  return {
    labels: Array.from({ length: one.names.length }, (_, id) => one.label(id)),
    names: [...one.distinctNames([...one.names.keys()], true).values()],
    encoded: texts.map((text) => [one.encode(text).ids, pieces(one.encodePieces(text))]),
    decoded: rows.map((ids) => [one.decode(ids), pieces(one.decodePieces(ids))]),
  };
})));
"""
CORPUS = [
    "The cat chased the mouse.",
    "L'homme n'a pas vu aujourd'hui l’été ; déjà-vu ?",
    "It's the cats' t-shirt: $3.50, i.e. 100%! &quot;yes&quot; d&apos;accord",
    "Ünïcödé 北京 is big. 한국어 עברית العربية 👩‍🔬 ½ ﬁne İstanbul ΟΔΟΣ",
    "  two  spaces\tand\na\r\nnewline  ",
]
ALPHABET = [
    *"abcdefghij THEcat'’-.,?!$^`&;#09",
    "é",
    "e\u0301",
    "ṩ",
    "İ",
    "ß",
    "Σ",
    "ς",
    "ﬁ",
    "½",
    "Å",
    "\u212b",
    "\u1100\u1161\u11a8",
]
ALPHABET += [
    "한",
    "北",
    "京",
    "𝒳",
    "👩‍🔬",
    "😀",
    "\u0307\u0323",
    "ا",
    "ש",
    "\u00a0",
    "\u2028",
    "\u3000",
    "\t",
    "\n",
    "\r",
    " ",
    "  ",
    "▁",
]
ALPHABET += ["\u200b", "\ufeff", "\x85", "\x00", "\x1c", "<unk>", "##", "'s", "'ll", "&quot;", "\u0e33", "ก็"]
ALPHABET += ["\r\n", "①", "Ⅷ", "ｶﾞ", "\x8f", "<s>", "<0x41>"]


LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def foreign_tokenizers():
    """Tokenizers of BERT (WordPiece), GPT-2 and Llama 3 (byte-level BPE), and Llama 2 (BPE with byte fallback)."""
    wordpiece = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    for lowercase in (True, False):
        wordpiece.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        wordpiece.decoder = decoders.WordPiece()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        wordpiece.train_from_iterator(
            CORPUS, trainers.WordPieceTrainer(vocab_size=160, special_tokens=special, show_progress=False)
        )
        yield tokenizers.Tokenizer.from_str(wordpiece.to_str())
    llama3 = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    for split in (pre_tokenizers.ByteLevel(add_prefix_space=True), llama3):
        gpt = tokenizers.Tokenizer(models.BPE())
        gpt.pre_tokenizer = split
        gpt.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=320,
            show_progress=False,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        gpt.train_from_iterator(CORPUS, trainer)
        yield gpt
    llama = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    llama.add_special_tokens([AddedToken("<unk>", special=True)])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    llama.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"])
    )
    content = json.loads(llama.to_str())
    for token in bytes_:
        content["model"]["vocab"].setdefault(token, len(content["model"]["vocab"]))
    llama = tokenizers.Tokenizer.from_str(json.dumps(content))
    llama.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    yield llama


def unigram_tokenizers(folder):
    """Tokenizers of T5 and XLM-R (Unigram of the `tokenizers` library), and of sentencepiece files."""
    charsmap = None
    for name in ("unigram", "unigram bytes", "unigram casefolded", "unigram across spaces", "unigram user-defined"):
        library = read_sentencepiece(write_file(folder, train_sentencepiece(**MODELS[name])))
        if charsmap is None:
            content = json.loads(library.to_str())["normalizer"]["normalizers"]
            charsmap = next(one for one in content if one["type"] == "Precompiled")
        yield library
    yield read_sentencepiece(write_file(folder, train_sentencepiece(**MODELS["bpe user-defined"])))
    vocabulary = [("<unk>", 0.0), ("▁", -2.0), ("<0x41>", 0.0), ("▁The", -4.0), ("cat", -3.5), ("ca", -2.5)]
    vocabulary += [("at", -2.9), ("▁c", -3.1), *((char, -5.0 - i / 7) for i, char in enumerate("abcdefhijtTÅé京😀')"))]
    t5 = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    precompiled = normalizers.Precompiled(base64.b64decode(charsmap["precompiled_charsmap"]))
    t5.normalizer = normalizers.Sequence([precompiled, normalizers.Replace(Regex(" {2,}"), "▁")])
    t5.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    t5.decoder = decoders.Metaspace()
    yield t5
    albert = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    albert.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), precompiled])
    albert.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    albert.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    yield albert


@pytest.fixture(scope="module")
def all_tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    found = [
        Tokenizer.train(CORPUS, kind, 300, lowercase, exact=exact, keep_newlines=keep)
        for kind in TOKENIZER_KINDS
        for lowercase in (False, True)
        for exact, keep in ((False, False), (kind == "char", kind == "word"))
    ]
    return found + [Tokenizer(one, FOREIGN_KIND) for one in (*foreign_tokenizers(), *unigram_tokenizers(folder))]


def test_same_ids_pieces_and_texts(all_tokenizers, tmp_path):
    random.seed(3)
    texts = [*CORPUS, "", " ", *("".join(random.choices(ALPHABET, k=random.randint(1, 24))) for _ in range(150))]
    cases = []
    for one in all_tokenizers:
        ids = [random.choices(range(one.vocab_size), k=random.randint(0, 9)) for _ in range(40)]
        cases.append({"tokenizer": tokenizer_header(one), "texts": texts, "rows": ids})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    (tmp_path / "run.mjs").write_text(bundle_script(SCRIPT.replace("FOLDER", str(tmp_path))), "utf-8")
    done = subprocess.run([node_program(), str(tmp_path / "run.mjs")], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    for one, case, found in zip(all_tokenizers, cases, json.loads(done.stdout)):
        name = f"{one.kind}: {json.loads(one.backend_tokenizer.to_str())['model']['type']}"
        assert found["labels"] == one.vocabulary, name
        assert found["names"] == list(one.distinct_names(range(one.vocab_size), strip=True).values()), name
        for text, (ids, pieces) in zip(texts, found["encoded"]):
            assert ids == one.encode(text), (
                name,
                text,
                [one.vocabulary[i] for i in ids],
                [one.vocabulary[i] for i in one.encode(text)],
            )
            expected = [[piece, [*span]] for piece, span in one.encode_as_pieces(text)]
            assert pieces == expected, (name, text, pieces, expected)
        for row, (text, pieces) in zip(case["rows"], found["decoded"]):
            assert text == one.decode(row), (name, row)
            assert pieces == [[piece, [*span]] for piece, span in one.decode_as_pieces(row)], (name, row)
