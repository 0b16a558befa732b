"""Tokenizer files of Hugging Face folders, read and written, compared with the classes of transformers."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from regard.data import SpecialTokens, Tokenizer, encode_texts
from regard.data.text.special_tokens import CAUSAL_LM_TOKENS, ENCODER_TOKENS, EOS, SEQ2SEQ_TOKENS
from regard.data.text.tokenizer import FOREIGN_KIND
from regard.errors import RegardError
from regard.interop import export_huggingface, import_huggingface
from regard.interop.sentencepiece_files import (
    CONTROL,
    NORMAL,
    UNIGRAM,
    Piece,
    PieceModel,
    build_tokenizer,
    read_sentencepiece,
)
from regard.interop.tokenizer_files import boundary_ids, read_tokenizer, set_special_template, write_tokenizer
from regard.pipelines import load, save
from tests.interop.model_comparison import assert_same_tensors
from tests.interop.sentencepiece_models import (
    MODELS,
    PLAIN_TEXTS,
    SENTENCES,
    SPECIAL_NAMES,
    TEXTS,
    UNUSUAL_TEXTS,
    VALID_PIECES,
    ids_of,
    load_sentencepiece,
    phrases,
    train_sentencepiece,
    write_file,
)

# -- reading ----------------------------------------------------------------------------------------------------------


def write_config(folder: Path, **table) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    return folder


def assert_same_tokenizer(hf_tokenizer, imported, texts=PLAIN_TEXTS) -> None:
    """Compares ids without and with special tokens, decoded texts and special ids."""
    for text in texts:
        ids = hf_tokenizer.encode(text, add_special_tokens=False)
        assert ids_of(imported.source, text) == ids, text
        assert imported.source.encode(text).ids == hf_tokenizer.encode(text), text
        if hf_tokenizer.unk_token_id not in ids:  # decoding omits it, with or without the spaces around it
            assert imported.source.decode(ids) == hf_tokenizer.decode(ids, skip_special_tokens=True), text
    expected = {
        role: getattr(hf_tokenizer, f"{role}_token_id") for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    }
    assert imported.special == {role: index for role, index in expected.items() if index is not None}


def train_wordpiece(lowercase: bool) -> list[str]:
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    library.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=names))
    vocab = library.get_vocab()
    return sorted(vocab, key=vocab.get)


@pytest.mark.parametrize(
    "options",
    [{}, {"do_lower_case": False}, {"strip_accents": False}, {"do_lower_case": False, "strip_accents": True}],
)
def test_bert_tokenizer_is_read(options, tmp_path):
    pieces = train_wordpiece(options.get("do_lower_case", True))
    folder = write_config(tmp_path, tokenizer_class="BertTokenizer", **options)
    (folder / "vocab.txt").write_text("\n".join([*pieces, "\u2028", "日", ""]))
    assert_same_tokenizer(
        transformers.BertTokenizer.from_pretrained(folder), read_tokenizer(folder), [*PLAIN_TEXTS, "x\u2028y", "日本"]
    )


def write_byte_level(folder: Path, names: list[str]) -> None:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(TEXTS, trainer)
    folder.mkdir(exist_ok=True)
    library.model.save(str(folder))


@pytest.mark.parametrize("add_prefix_space", [False, True])
@pytest.mark.parametrize("name", ["GPT2", "Roberta"])
def test_gpt2_and_roberta_tokenizers_are_read(name, add_prefix_space, tmp_path):
    names = ["<|endoftext|>"] if name == "GPT2" else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    write_byte_level(tmp_path, names)
    folder = write_config(tmp_path, tokenizer_class=f"{name}Tokenizer", add_prefix_space=add_prefix_space)
    assert_same_tokenizer(
        getattr(transformers, f"{name}Tokenizer").from_pretrained(folder),
        read_tokenizer(folder),
        [*PLAIN_TEXTS, *UNUSUAL_TEXTS],
    )


def test_gpt2_tokenizer_adds_bos_on_request(tmp_path):
    write_byte_level(tmp_path, ["<|endoftext|>"])
    folder = write_config(tmp_path, tokenizer_class="GPT2Tokenizer", add_bos_token=True)
    imported = read_tokenizer(folder)
    assert_same_tokenizer(transformers.GPT2Tokenizer.from_pretrained(folder), imported)
    assert boundary_ids(imported.source) == (0, None)


def test_t5_tokenizer_is_read(tmp_path):
    content = train_sentencepiece(model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    write_file(tmp_path, content, "spiece.model")
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    imported = read_tokenizer(tmp_path)
    assert imported.source is imported.target
    assert imported.special == {"eos": 1, "unk": 2, "pad": 0}
    assert boundary_ids(imported.source) == (None, 1)
    for text in [*SENTENCES, "</s> <extra_id_0>"]:
        assert ids_of(imported.source, text) == load_sentencepiece(content).encode(text)
    # Extra ids are in descending order.
    assert imported.source.get_vocab_size() == 600
    assert imported.source.token_to_id("<extra_id_0>") == 599
    assert imported.source.decode([599, *load_sentencepiece(content).encode("the cat")]) == "the cat"
    other = transformers.T5Tokenizer.from_pretrained(tmp_path)
    assert [ids_of(imported.source, text) for text in PLAIN_TEXTS] == [
        other.encode(text, add_special_tokens=False) for text in PLAIN_TEXTS
    ]


def test_albert_tokenizer_is_read(tmp_path):
    content = train_sentencepiece(
        model_type="unigram", control_symbols="[CLS],[SEP],[MASK]", pad_id=0, unk_id=1, bos_id=-1, eos_id=-1
    )
    folder = write_config(tmp_path, tokenizer_class="AlbertTokenizer")
    write_file(tmp_path, content, "spiece.model")
    assert_same_tokenizer(
        transformers.AlbertTokenizer.from_pretrained(folder), read_tokenizer(folder), [*PLAIN_TEXTS, "``été''"]
    )
    write_config(tmp_path, tokenizer_class="AlbertTokenizer", do_lower_case=False, keep_accents=True)
    assert_same_tokenizer(
        transformers.AlbertTokenizer.from_pretrained(folder), read_tokenizer(folder), [*PLAIN_TEXTS, "``été''"]
    )


def test_deberta_tokenizer_is_read(tmp_path):
    content = train_sentencepiece(
        **dict(model_type="unigram", pad_id=0, bos_id=1, eos_id=2, unk_id=3),
        **dict(pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]"),
    )
    folder = write_config(tmp_path, tokenizer_class="DebertaV2Tokenizer")
    write_file(tmp_path, content, "spm.model")
    imported = read_tokenizer(folder)
    assert_same_tokenizer(transformers.DebertaV2Tokenizer.from_pretrained(folder), imported, PLAIN_TEXTS)
    assert imported.special["mask"] == load_sentencepiece(content).get_piece_size()  # after all pieces
    write_config(tmp_path, tokenizer_class="DebertaV2Tokenizer", split_by_punct=True)
    with pytest.raises(RegardError, match="split_by_punct"):
        read_tokenizer(folder)


def test_xlm_roberta_tokenizer_is_read(tmp_path):
    folder = write_config(tmp_path, tokenizer_class="XLMRobertaTokenizer")
    write_file(tmp_path, train_sentencepiece(**MODELS["unigram"]), "sentencepiece.bpe.model")
    assert_same_tokenizer(transformers.XLMRobertaTokenizer.from_pretrained(folder), read_tokenizer(folder))


def test_llama_tokenizer_is_read(tmp_path):
    content = train_sentencepiece(**MODELS["bpe llama"])
    folder = write_config(tmp_path, tokenizer_class="LlamaTokenizer", add_bos_token=True)
    write_file(tmp_path, content, "tokenizer.model")
    imported = read_tokenizer(folder)
    assert_same_tokenizer(transformers.LlamaTokenizer.from_pretrained(folder), imported)
    assert boundary_ids(imported.source) == (1, None)
    for text in SENTENCES:  # including leading spaces, of which transformers drops one
        assert ids_of(imported.source, text) == load_sentencepiece(content).encode(text)


def write_marian(folder: Path, **options) -> Path:
    """Writes a Marian tokenizer; source and target are trained on different texts and share most pieces."""
    folder = write_config(folder, tokenizer_class="MarianTokenizer", **options)
    sides = []
    for name, texts in (("source.spm", TEXTS[::2]), ("target.spm", TEXTS[1::2])):
        file = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            **dict(sentence_iterator=iter(texts), model_writer=file, vocab_size=300, required_chars="éàèâêç,!"),
            **dict(minloglevel=2, num_threads=1),
        )
        write_file(folder, file.getvalue(), name)
        other = load_sentencepiece(file.getvalue())
        sides.append([other.id_to_piece(i) for i in range(3, other.vocab_size())])
    if not options.get("separate_vocabs"):
        sides = [[">>fra<<", *sorted({*sides[0], *sides[1]})]]
    for name, pieces in zip(("vocab.json", "target_vocab.json"), sides):
        names = ["</s>", "<unk>", *reversed(pieces), "<pad>"]
        (folder / name).write_text(json.dumps({piece: index for index, piece in enumerate(names)}))
    return folder


@pytest.mark.filterwarnings("ignore:Recommended")
@pytest.mark.parametrize("separate", [False, True])
def test_marian_tokenizer_is_read(separate, tmp_path):
    folder = write_marian(tmp_path, **({"separate_vocabs": True} if separate else {}))
    imported, other = read_tokenizer(folder), transformers.MarianTokenizer.from_pretrained(folder)
    assert imported.special == {"eos": 0, "unk": 1, "pad": imported.source.get_vocab_size() - 1}
    assert boundary_ids(imported.source) == boundary_ids(imported.target) == (None, 0)
    texts = [*PLAIN_TEXTS, "the ☃☃ 日 cat", "été"]
    if not separate:
        assert imported.source.get_vocab_size() == imported.target.get_vocab_size() == len(other.get_vocab())
        texts += [">>fra<< The cat.", ">>fra<<the"]
    for text in texts:
        assert ids_of(imported.source, text) == other.encode(text, add_special_tokens=False), text
        ids = other(text_target=text, add_special_tokens=False)["input_ids"]
        assert ids_of(imported.target, text) == ids, text
        if other.unk_token_id not in ids:
            assert imported.target.decode(ids) == other.decode(
                ids, skip_special_tokens=True, use_source_tokenizer=False
            )
    if not separate:  # pieces of the source only are never encoded by the target but can be decoded
        source_only = next(name for name in imported.target.get_vocab() if name.endswith(" ") and len(name) > 4)
        ids = [imported.target.token_to_id(source_only)]
        assert imported.target.decode(ids) == source_only.replace("▁", "").strip()
        assert ids_of(imported.source, source_only.replace("▁", " ")) != ids_of(
            imported.target, source_only.replace("▁", " ")
        )


@pytest.mark.filterwarnings("ignore:Recommended")
@pytest.mark.parametrize("separate", [False, True])
def test_marian_tokenizer_round_trip(separate, tmp_path):
    """Through a model folder of Regard."""
    folder = write_marian(tmp_path / "in", **({"separate_vocabs": True} if separate else {}))
    sizes = [len(json.loads(file.read_text())) for file in sorted(folder.glob("*vocab.json"), reverse=True)]
    config = transformers.MarianConfig(
        **dict(vocab_size=sizes[0], decoder_vocab_size=sizes[-1], d_model=16, encoder_layers=1, decoder_layers=1),
        **dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=9, decoder_ffn_dim=9),
        **dict(pad_token_id=sizes[0] - 1, decoder_start_token_id=sizes[0] - 1, eos_token_id=0, forced_eos_token_id=0),
        **dict(share_encoder_decoder_embeddings=not separate, max_position_embeddings=64),
    )
    transformers.MarianMTModel(config).save_pretrained(folder)
    save(tmp_path / "own", import_huggingface(folder))
    translator = load(tmp_path / "own", "cpu")
    assert export_huggingface(translator, tmp_path / "out") == "MarianMTModel"
    assert_same_tensors(folder, tmp_path / "out")
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "out"))
    again = import_huggingface(tmp_path / "out")
    assert again.special == translator.special
    for text in [*PLAIN_TEXTS, *([] if separate else [">>fra<< The cat."])]:
        ids = before(text)["input_ids"]
        assert after(text)["input_ids"] == again.encode_source(text) == translator.encode_source(text) == ids
        targets = [other(text_target=text, add_special_tokens=False)["input_ids"] for other in (before, after)]
        assert targets[0] == targets[1] == again.encode_target(text)


def test_marian_with_different_special_ids_is_an_error(tmp_path):
    folder = write_marian(tmp_path, separate_vocabs=True)
    table = json.loads((folder / "target_vocab.json").read_text())
    last = len(table) - 1
    (folder / "target_vocab.json").write_text(json.dumps(table | {"<pad>": last + 1, "more": last}))
    with pytest.raises(RegardError, match="source and target have different ids of special tokens"):
        read_tokenizer(folder)


def test_marian_encodes_repeated_characters_of_the_other_side(tmp_path):
    """transformers looks up the repeated characters as one piece and finds only single ones."""
    folder = write_marian(tmp_path)
    target = read_tokenizer(folder).target
    other = sentencepiece.SentencePieceProcessor(model_file=str(folder / "target.spm"))
    known = [name for name in "kwyWY" if other.piece_to_id(name) == other.unk_id() and target.token_to_id(name)]
    assert known
    for name in known:
        assert ids_of(target, name * 2)[-2:] == [target.token_to_id(name)] * 2


def test_marian_splits_pieces_missing_from_the_vocabulary(tmp_path):
    folder = write_marian(tmp_path)
    table = json.loads((folder / "vocab.json").read_text())
    names = [name for name in sorted(table, key=table.get) if name != "▁the"]
    (folder / "vocab.json").write_text(json.dumps({name: index for index, name in enumerate(names)}))
    source = read_tokenizer(folder).source
    assert len(ids_of(source, "the")) > 1
    assert source.decode(ids_of(source, "the")) == "the"


def test_tokenizer_json_takes_precedence_without_truncation_and_padding(tmp_path):
    library = tokenizers.Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "</s>": 2, "a": 3, "b": 4}, "<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<pad>", "<unk>"])
    library.enable_truncation(3)
    library.enable_padding(length=5)
    folder = write_config(tmp_path, eos_token={"content": "</s>"}, pad_token="<pad>", mask_token="<mask>")
    (folder / "special_tokens_map.json").write_text('{"unk_token": "<unk>", "bos_token": null}')
    (folder / "vocab.txt").write_text("nothing")
    library.save(str(folder / "tokenizer.json"))
    imported = read_tokenizer(folder)
    assert imported.special == {"eos": 2, "unk": 1, "pad": 0}
    assert imported.source is imported.target
    assert ids_of(imported.source, "a b a b") == [3, 4, 3, 4]
    assert imported.source.decode([3, 2]) == "a"
    # The name of a special token is encoded as text, here unknown.
    assert 2 not in ids_of(imported.source, "a </s> b")


def test_added_tokens_keep_their_ids(tmp_path):
    folder = write_config(
        tmp_path,
        tokenizer_class="LlamaTokenizer",
        added_tokens_decoder={"1": {"content": "<s>", "special": True}, "500": {"content": "<new>", "special": True}},
        pad_token="<new>",
    )
    write_file(folder, train_sentencepiece(**MODELS["bpe"]), "tokenizer.model")
    assert read_tokenizer(folder).special["pad"] == 500
    write_config(folder, tokenizer_class="LlamaTokenizer")
    (folder / "added_tokens.json").write_text('{"<two>": 501, "<one>": 500}')
    library = read_tokenizer(folder).source
    assert ids_of(library, "<two>") == [501]
    (folder / "added_tokens.json").write_text('{"<two>": 501}')
    with pytest.raises(RegardError, match=r"added_tokens.json: expected id 501 for '<two>', got 500"):
        read_tokenizer(folder)
    (folder / "added_tokens.json").write_text('{"<two>": "many"}')
    with pytest.raises(RegardError, match=r"added_tokens.json: invalid added tokens"):
        read_tokenizer(folder)


INVALID_FOLDERS = {
    r"the tokenizer is missing. Expected one of": {},
    r"tokenizer.json is not a tokenizer file": {"tokenizer.json": "{}"},
    r"spiece.model: not a sentencepiece file": {"spiece.model": "never"},
    r"tokenizer.model: unsupported tokenizer class 'gemma'": {
        "tokenizer.model": "",
        "config.json": '{"model_type": "gemma"}',
    },
    r"vocab.json: unsupported tokenizer class 'qwen2'": {
        "vocab.json": "{}",
        "tokenizer_config.json": '{"tokenizer_class": "Qwen2TokenizerFast"}',
    },
    r"vocab.txt: the entry \[UNK\] is missing": {"vocab.txt": "a\nb\n"},
    r"vocab.txt: duplicate entry 'a'": {"vocab.txt": "[UNK]\na\na\n"},
    r"do_lower_case must be true or false \(got 'no'\)": {
        "vocab.txt": "[UNK]\n",
        "tokenizer_config.json": '{"do_lower_case": "no"}',
    },
    r"unk_token = 3; expected a name": {"vocab.txt": "[UNK]\n", "special_tokens_map.json": '{"unk_token": 3}'},
    r"tokenizer_config.json: not JSON": {"vocab.txt": "[UNK]\n", "tokenizer_config.json": "{"},
    r"merges.txt: the file is missing": {"vocab.json": '{"a": 0}'},
    r"merges.txt: 'a c' does not match vocab.json": {
        "vocab.json": '{"a": 0, "b": 1}',
        "merges.txt": "#version: 0.2\na c\n",
    },
    r"vocab.json: the ids are not 0, 1, 2": {"vocab.json": '{"a": 0, "b": 2}', "merges.txt": ""},
    r"target.spm: the file is missing": {
        "source.spm": lambda: train_sentencepiece(**MODELS["unigram"]),
        "vocab.json": '{"</s>": 0, "<unk>": 1, "<pad>": 2}',
    },
    r"source.spm: BPE with ids from another file": {
        "source.spm": lambda: train_sentencepiece(**MODELS["bpe"]),
        "vocab.json": '{"<unk>": 0}',
    },
    r"vocab.json: the entry for unknown pieces is missing": {
        "source.spm": lambda: train_sentencepiece(**MODELS["unigram"]),
        "vocab.json": '{"</s>": 0}',
    },
    r"expected <unk>, <s> and </s> as the first pieces": {
        "sentencepiece.bpe.model": lambda: train_sentencepiece(
            model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1
        )
    },
}


@pytest.mark.parametrize("message", INVALID_FOLDERS)
def test_missing_and_invalid_files_are_named(message, tmp_path):
    for name, content in INVALID_FOLDERS[message].items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content())
    with pytest.raises(RegardError, match=message) as error:
        read_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)


# -- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "special", [SEQ2SEQ_TOKENS, CAUSAL_LM_TOKENS, ENCODER_TOKENS], ids=["translating", "writing", "reading"]
)
@pytest.mark.parametrize("kind", ["word", "char", "bpe", "bytes"])
def test_transformers_gives_the_ids_of_tokenizers_trained_with_regard(kind, special, tmp_path):
    tokenizer = Tokenizer.train(TEXTS, kind, vocab_size=400, mask=special.mask is not None)
    write_tokenizer(tokenizer, tmp_path, special, segments=special is ENCODER_TOKENS, settings={"model_max_length": 77})
    texts = [*phrases("phrasebook:test", 20), *UNUSUAL_TEXTS, "<eos> <sos>", "a<unk>"]
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for other in (fast, transformers.AutoTokenizer.from_pretrained(tmp_path)):
        assert len(other) == tokenizer.vocab_size
        for text in texts:
            ids = tokenizer.encode(text)
            assert other.encode(text, add_special_tokens=False) == ids, text
            assert other(text)["input_ids"] == special.add_special_tokens(ids), text
            if kind != "char":  # Regard composes accents with their letters
                assert other.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert (fast.pad_token_id, fast.unk_token_id, fast.bos_token_id, fast.eos_token_id) == (0, 1, 2, 3)
    assert (fast.mask_token_id, fast.model_max_length) == (special.mask, 77)
    if special is ENCODER_TOKENS:
        assert fast("<mask>", split_special_tokens=False)["input_ids"] == [2, 4, 3]
        pair = fast("the", "cat")
        assert pair["input_ids"] == [2, *tokenizer.encode("the"), EOS, *tokenizer.encode("cat"), EOS]
        assert pair["token_type_ids"] == [0] * (2 + len(tokenizer.encode("the"))) + [1] * (
            1 + len(tokenizer.encode("cat"))
        )
    imported = read_tokenizer(tmp_path)
    assert [ids_of(imported.source, text) for text in texts] == tokenizer.encode_batch(texts)
    assert imported.special["eos"] == 3


@pytest.mark.parametrize("name", ["unigram", "bpe llama", "bpe user-defined", "unigram user-defined"])
def test_transformers_gives_the_ids_of_sentencepiece_tokenizers(name, tmp_path):
    content = train_sentencepiece(**MODELS[name])
    tokenizer = Tokenizer(read_sentencepiece(write_file(tmp_path, content)), FOREIGN_KIND)
    special = SpecialTokens(pad=2, unk=0, sos=1, eos=2, begin=1)
    write_tokenizer(tokenizer, tmp_path / "folder", special)
    (tmp_path / "folder" / "config.json").write_text('{"model_type": "llama"}')
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    for text in [*SENTENCES, *SPECIAL_NAMES]:
        assert other(text)["input_ids"] == [1, *load_sentencepiece(content).encode(text)], text


def test_roberta_text_pairs_match_transformers(tmp_path):
    """Two separators between the texts, from vocab.json and tokenizer.json, before and after an export."""
    write_byte_level(tmp_path, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    write_config(tmp_path, tokenizer_class="RobertaTokenizer")
    other = transformers.RobertaTokenizer.from_pretrained(tmp_path)
    other.save_pretrained(tmp_path / "saved")
    sizes = dict(vocab_size=len(other), hidden_size=24, num_attention_heads=2, num_hidden_layers=1, intermediate_size=9)
    model = transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**sizes, max_position_embeddings=40, type_vocab_size=2, initializer_range=0.5)
    ).eval()
    pairs = [("the cat", "a dog"), ("", "a"), ("The cat sat there.", "☃"), ("the " * 30, "a")]
    for folder in (tmp_path, tmp_path / "saved"):
        model.save_pretrained(folder)
        encoder = import_huggingface(folder)
        assert encoder.special.between == other.sep_token_id
        export_huggingface(encoder, folder / "out")
        again = transformers.AutoTokenizer.from_pretrained(folder / "out")
        texts, _ = encode_texts(pairs, encoder.tokenizer, encoder.special, max_len=38, segments=False)
        for index, pair in enumerate(pairs):
            expected = other(*pair, truncation="longest_first", max_length=38)["input_ids"]
            assert texts.ids[index].tolist() == expected
            assert again(*pair, truncation="longest_first", max_length=38)["input_ids"] == expected
        assert "token_type_ids" not in again.model_input_names
        imported = encoder.classify(pairs, truncate=True)
        expected = model(**other(*pairs[0], return_tensors="pt")).logits.softmax(-1)[0].tolist()
        assert list(imported[0].probabilities.values()) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", ["XLMRoberta", "Camembert"])
def test_xlm_roberta_and_camembert_tokenizers_match_transformers(family, tmp_path):
    """tokenizer.json with a unigram model and unusual ids of <s> and </s>."""
    library = read_sentencepiece(write_file(tmp_path, train_sentencepiece(**MODELS["unigram"])))
    pieces = [
        tuple(row) for row in json.loads(library.to_str())["model"]["vocab"] if row[0] not in ("<unk>", "<s>", "</s>")
    ]
    first = {"XLMRoberta": ["<s>", "<pad>", "</s>", "<unk>"]}.get(family)
    first = first or ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"]
    vocab = [*((name, 0.0) for name in first), *pieces, ("<mask>", 0.0)]
    other = getattr(transformers, f"{family}Tokenizer")(vocab=vocab)
    other.save_pretrained(tmp_path / "in")
    sizes = dict(vocab_size=len(vocab), hidden_size=24, num_attention_heads=2, num_hidden_layers=1)
    ids = dict(bos_token_id=other.bos_token_id, eos_token_id=other.eos_token_id, pad_token_id=other.pad_token_id)
    config = getattr(transformers, f"{family}Config")(**sizes, **ids, intermediate_size=9, max_position_embeddings=200)
    getattr(transformers, f"{family}Model")(config).save_pretrained(tmp_path / "in")
    encoder = import_huggingface(tmp_path / "in")
    begin, end = first.index("<s>"), first.index("</s>")
    assert encoder.special == SpecialTokens(
        pad=1, unk=3, sos=begin, eos=end, mask=len(vocab) - 1, begin=begin, end=end, between=end
    )
    export_huggingface(encoder, tmp_path / "out")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in PLAIN_TEXTS:
        assert encoder.encode_text(text) == other(text)["input_ids"] == again(text)["input_ids"], text
    pair = "the cat", "a dog"
    texts, _ = encode_texts([pair], encoder.tokenizer, encoder.special, max_len=99, segments=False)
    assert texts.ids[0].tolist() == other(*pair)["input_ids"] == again(*pair)["input_ids"]


def test_existing_special_template_is_kept(tmp_path):
    """RoBERTa has two separators between the texts of a pair."""
    write_byte_level(tmp_path, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    write_config(tmp_path, tokenizer_class="RobertaTokenizer")
    transformers.RobertaTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "first")
    imported = read_tokenizer(tmp_path / "first")
    special = SpecialTokens(pad=1, unk=3, sos=0, eos=2, mask=4, begin=0, end=2)
    write_tokenizer(Tokenizer(imported.source, FOREIGN_KIND), tmp_path / "second", special)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "second")
    ids = other("the", "cat")["input_ids"]
    assert [index for index in ids if index < 5] == [0, 2, 2, 2]
    assert (other.cls_token, other.sep_token, other.mask_token) == ("<s>", "</s>", "<mask>")


def test_special_ids_missing_from_the_tokenizer_are_an_error(tmp_path):
    with pytest.raises(RegardError, match="no entry for the mask_token"):
        write_tokenizer(Tokenizer.train(["a"], "word"), tmp_path, SpecialTokens(mask=99))
    assert not list(tmp_path.iterdir())


def test_several_special_tokens_before_a_text_are_an_error():
    library = build_tokenizer(
        PieceModel([*VALID_PIECES, Piece("</s>", kind=CONTROL), Piece("c", -1, NORMAL)], UNIGRAM), "x"
    )
    library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> <s> $A", special_tokens=[("<s>", 1)])
    library.decoder = decoders.Fuse()
    with pytest.raises(RegardError, match="several special tokens before or after each text"):
        boundary_ids(library)


# -- flags of tokenizer_config.json beside tokenizer.json -------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},  # the default of the class: lower case
        {"do_lower_case": True},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
    ],
)
@pytest.mark.parametrize("saved_lowercase", [False, True])
def test_flags_of_bert_apply_to_tokenizer_json(options, saved_lowercase, tmp_path):
    pieces = [*dict.fromkeys([*train_wordpiece(True), *train_wordpiece(False)]), "日", "##本", "É", "é"]
    library = tokenizers.Tokenizer(models.WordPiece({name: i for i, name in enumerate(pieces)}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=saved_lowercase)
    library.pre_tokenizer, library.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    library.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = write_config(tmp_path, tokenizer_class="BertTokenizer", **options)
    library.save(str(folder / "tokenizer.json"))
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert_same_tokenizer(hf_tokenizer, read_tokenizer(folder), ["The CAT É", "日本", "Été É é"])


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("flag", [False, True])
def test_prefix_space_of_gpt2_applies_to_tokenizer_json(flag, saved, tmp_path):
    write_byte_level(tmp_path, ["<|endoftext|>"])
    library = tokenizers.Tokenizer(models.BPE.from_file(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=saved), decoders.ByteLevel()
    folder = write_config(tmp_path, tokenizer_class="GPT2Tokenizer", add_prefix_space=flag)
    library.save(str(folder / "tokenizer.json"))
    assert_same_tokenizer(transformers.AutoTokenizer.from_pretrained(folder), read_tokenizer(folder))


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize(("key", "flag"), [("add_bos_token", True), ("add_bos_token", False), ("add_eos_token", True)])
def test_ignored_boundary_flags_are_reported(key, flag, adds_bos, tmp_path, caplog):
    """transformers 5 ignores them beside tokenizer.json."""
    library = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    if adds_bos:
        library.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    folder = write_config(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **{key: flag}, **roles)
    library.save(str(folder / "tokenizer.json"))
    with caplog.at_level("WARNING", "regard"):
        ids = read_tokenizer(folder).source.encode("a").ids
    assert ids == transformers.AutoTokenizer.from_pretrained(folder).encode("a")
    is_contradiction = flag != ((0 if key == "add_bos_token" else 1) in ids)
    assert (f"{key} = {flag} is ignored" in caplog.text) == is_contradiction


def test_contradicting_flags_are_errors(tmp_path):
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    library.save(str(tmp_path / "tokenizer.json"))
    for options in (
        {"tokenizer_class": "AlbertTokenizer", "do_lower_case": True},
        {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": True},
    ):
        write_config(tmp_path, **options)
        with pytest.raises(RegardError, match=f"{list(options)[1]} = True is unsupported"):
            read_tokenizer(tmp_path)


@pytest.mark.parametrize("file", ["vocab.txt", "tokenizer.json without segments"])
def test_segments_of_text_pairs_survive_export(file, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*train_wordpiece(True), ""]))
    folder = write_config(tmp_path, tokenizer_class="BertTokenizer")
    expected = transformers.BertTokenizer.from_pretrained(folder)("the cat", "a dog")
    library = read_tokenizer(folder).source
    if file != "vocab.txt":
        set_special_template(library, 2, 3)
    special = SpecialTokens(pad=0, unk=1, sos=2, eos=3, mask=4, begin=2, end=3)
    write_tokenizer(Tokenizer(library, FOREIGN_KIND), tmp_path / "out", special, segments=True)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("the cat", "a dog")
    assert (exported["input_ids"], exported["token_type_ids"]) == (expected["input_ids"], expected["token_type_ids"])
    assert 1 in expected["token_type_ids"]
