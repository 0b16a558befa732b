"""The tokenizers of Hugging Face's folders, read and written, beside the classes of transformers."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from regard.data import Special, Tokenizer, encode_texts
from regard.data.special import EOS, READING, TRANSLATING, WRITING
from regard.data.tokenizer import FOREIGN
from regard.errors import RegardError
from regard.folder import load, save
from regard.interop import export_folder, import_folder
from regard.interop.sentencepiece import (
    CONTROL,
    NORMAL,
    UNIGRAM,
    Piece,
    PieceModel,
    build_tokenizer,
    read_sentencepiece,
)
from regard.interop.tokenizer_files import boundary_ids, read_tokenizer, write_tokenizer
from tests.interop.model_comparison import assert_same_tensors
from tests.interop.sentencepiece_models import (
    MODELS,
    NAMES,
    ODD,
    PLAIN,
    SENTENCES,
    SOUND,
    TEXTS,
    ids_of,
    phrases,
    theirs,
    trained,
    written,
)

# -- folders ----------------------------------------------------------------------------------------------------------


def config(folder: Path, **table) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    return folder


def same_as(theirs, found, texts=PLAIN) -> None:
    """Ids without and with what frames a text, decoded texts, and the special ids."""
    for text in texts:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ids_of(found.source, text) == ids, text
        assert found.source.encode(text).ids == theirs.encode(text), text
        if theirs.unk_token_id not in ids:  # which is left out, with or without the spaces around it
            assert found.source.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    named = {role: getattr(theirs, f"{role}_token_id") for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    assert found.special == {role: index for role, index in named.items() if index is not None}


def wordpieces(lowercase: bool) -> list[str]:
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
def test_bert(options, tmp_path):
    pieces = wordpieces(options.get("do_lower_case", True))
    folder = config(tmp_path, tokenizer_class="BertTokenizer", **options)
    (folder / "vocab.txt").write_text("\n".join([*pieces, "\u2028", "日", ""]))
    same_as(transformers.BertTokenizer.from_pretrained(folder), read_tokenizer(folder), [*PLAIN, "x\u2028y", "日本"])


def byte_level(folder: Path, names: list[str]) -> None:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(TEXTS, trainer)
    folder.mkdir(exist_ok=True)
    library.model.save(str(folder))


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("name", ["GPT2", "Roberta"])
def test_gpt_2_and_roberta(name, spaced, tmp_path):
    names = ["<|endoftext|>"] if name == "GPT2" else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    byte_level(tmp_path, names)
    folder = config(tmp_path, tokenizer_class=f"{name}Tokenizer", add_prefix_space=spaced)
    same_as(getattr(transformers, f"{name}Tokenizer").from_pretrained(folder), read_tokenizer(folder), [*PLAIN, *ODD])


def test_gpt_2_may_begin_with_bos(tmp_path):
    byte_level(tmp_path, ["<|endoftext|>"])
    folder = config(tmp_path, tokenizer_class="GPT2Tokenizer", add_bos_token=True)
    found = read_tokenizer(folder)
    same_as(transformers.GPT2Tokenizer.from_pretrained(folder), found)
    assert boundary_ids(found.source) == (0, None)


def test_t5(tmp_path):
    content = trained(model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    written(tmp_path, content, "spiece.model")
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    found = read_tokenizer(tmp_path)
    assert found.source is found.target
    assert found.special == {"eos": 1, "unk": 2, "pad": 0}
    assert boundary_ids(found.source) == (None, 1)
    for text in [*SENTENCES, "</s> <extra_id_0>"]:
        assert ids_of(found.source, text) == theirs(content).encode(text)
    # The last of the extra ids is the first of their names.
    assert found.source.get_vocab_size() == 600
    assert found.source.token_to_id("<extra_id_0>") == 599
    assert found.source.decode([599, *theirs(content).encode("the cat")]) == "the cat"
    other = transformers.T5Tokenizer.from_pretrained(tmp_path)
    assert [ids_of(found.source, text) for text in PLAIN] == [
        other.encode(text, add_special_tokens=False) for text in PLAIN
    ]


def test_albert(tmp_path):
    content = trained(
        model_type="unigram", control_symbols="[CLS],[SEP],[MASK]", pad_id=0, unk_id=1, bos_id=-1, eos_id=-1
    )
    folder = config(tmp_path, tokenizer_class="AlbertTokenizer")
    written(tmp_path, content, "spiece.model")
    same_as(transformers.AlbertTokenizer.from_pretrained(folder), read_tokenizer(folder), [*PLAIN, "``été''"])
    config(tmp_path, tokenizer_class="AlbertTokenizer", do_lower_case=False, keep_accents=True)
    same_as(transformers.AlbertTokenizer.from_pretrained(folder), read_tokenizer(folder), [*PLAIN, "``été''"])


def test_xlm_roberta(tmp_path):
    folder = config(tmp_path, tokenizer_class="XLMRobertaTokenizer")
    written(tmp_path, trained(**MODELS["unigram"]), "sentencepiece.bpe.model")
    same_as(transformers.XLMRobertaTokenizer.from_pretrained(folder), read_tokenizer(folder))


def test_llama(tmp_path):
    content = trained(**MODELS["bpe of llama"])
    folder = config(tmp_path, tokenizer_class="LlamaTokenizer", add_bos_token=True)
    written(tmp_path, content, "tokenizer.model")
    found = read_tokenizer(folder)
    same_as(transformers.LlamaTokenizer.from_pretrained(folder), found)
    assert boundary_ids(found.source) == (1, None)
    for text in SENTENCES:  # spaces in front too, of which transformers keeps one less
        assert ids_of(found.source, text) == theirs(content).encode(text)


def marian(folder: Path, **options) -> Path:
    """The two sides have learnt from different texts, and share most pieces; some language is named in front."""
    folder = config(folder, tokenizer_class="MarianTokenizer", **options)
    sides = []
    for name, texts in (("source.spm", TEXTS[::2]), ("target.spm", TEXTS[1::2])):
        file = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            **dict(sentence_iterator=iter(texts), model_writer=file, vocab_size=300, required_chars="éàèâêç,!"),
            **dict(minloglevel=2, num_threads=1),
        )
        written(folder, file.getvalue(), name)
        other = theirs(file.getvalue())
        sides.append([other.id_to_piece(i) for i in range(3, other.vocab_size())])
    if not options.get("separate_vocabs"):
        sides = [[">>fra<<", *sorted({*sides[0], *sides[1]})]]
    for name, pieces in zip(("vocab.json", "target_vocab.json"), sides):
        names = ["</s>", "<unk>", *reversed(pieces), "<pad>"]
        (folder / name).write_text(json.dumps({piece: index for index, piece in enumerate(names)}))
    return folder


@pytest.mark.filterwarnings("ignore:Recommended")
@pytest.mark.parametrize("separate", [False, True])
def test_marian(separate, tmp_path):
    folder = marian(tmp_path, **({"separate_vocabs": True} if separate else {}))
    found, other = read_tokenizer(folder), transformers.MarianTokenizer.from_pretrained(folder)
    assert found.special == {"eos": 0, "unk": 1, "pad": found.source.get_vocab_size() - 1}
    assert boundary_ids(found.source) == boundary_ids(found.target) == (None, 0)
    texts = [*PLAIN, "the ☃☃ 日 cat", "été"]
    if not separate:
        assert found.source.get_vocab_size() == found.target.get_vocab_size() == len(other.get_vocab())
        texts += [">>fra<< The cat.", ">>fra<<the"]
    for text in texts:
        assert ids_of(found.source, text) == other.encode(text, add_special_tokens=False), text
        ids = other(text_target=text, add_special_tokens=False)["input_ids"]
        assert ids_of(found.target, text) == ids, text
        if other.unk_token_id not in ids:
            assert found.target.decode(ids) == other.decode(ids, skip_special_tokens=True, use_source_tokenizer=False)
    if not separate:  # what only the source has, the target never reads and can yet write
        only = next(name for name in found.target.get_vocab() if name.endswith(" ") and len(name) > 4)
        ids = [found.target.token_to_id(only)]
        assert found.target.decode(ids) == only.replace("▁", "").strip()
        assert ids_of(found.source, only.replace("▁", " ")) != ids_of(found.target, only.replace("▁", " "))


@pytest.mark.filterwarnings("ignore:Recommended")
@pytest.mark.parametrize("separate", [False, True])
def test_marian_goes_out_again(separate, tmp_path):
    """By way of a folder of ours."""
    folder = marian(tmp_path / "in", **({"separate_vocabs": True} if separate else {}))
    sizes = [len(json.loads(file.read_text())) for file in sorted(folder.glob("*vocab.json"), reverse=True)]
    made = transformers.MarianConfig(
        **dict(vocab_size=sizes[0], decoder_vocab_size=sizes[-1], d_model=16, encoder_layers=1, decoder_layers=1),
        **dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=9, decoder_ffn_dim=9),
        **dict(pad_token_id=sizes[0] - 1, decoder_start_token_id=sizes[0] - 1, eos_token_id=0, forced_eos_token_id=0),
        **dict(share_encoder_decoder_embeddings=not separate, max_position_embeddings=64),
    )
    transformers.MarianMTModel(made).save_pretrained(folder)
    save(tmp_path / "own", import_folder(folder))
    translator = load(tmp_path / "own", "cpu")
    assert export_folder(translator, tmp_path / "out") == "MarianMTModel"
    assert_same_tensors(folder, tmp_path / "out")
    before, after = (transformers.AutoTokenizer.from_pretrained(one) for one in (folder, tmp_path / "out"))
    again = import_folder(tmp_path / "out")
    assert again.special == translator.special
    for text in [*PLAIN, *([] if separate else [">>fra<< The cat."])]:
        ids = before(text)["input_ids"]
        assert after(text)["input_ids"] == again.source_ids(text) == translator.source_ids(text) == ids
        written = [other(text_target=text, add_special_tokens=False)["input_ids"] for other in (before, after)]
        assert written[0] == written[1] == again.target_ids(text)


def test_the_two_sides_of_marian_have_the_same_special_ids(tmp_path):
    folder = marian(tmp_path, separate_vocabs=True)
    table = json.loads((folder / "target_vocab.json").read_text())
    last = len(table) - 1
    (folder / "target_vocab.json").write_text(json.dumps(table | {"<pad>": last + 1, "more": last}))
    with pytest.raises(RegardError, match="special tokens have other ids on the other side"):
        read_tokenizer(folder)


def test_a_run_of_characters_that_only_the_other_side_knows_is_read(tmp_path):
    """transformers looks the run up as a whole: a single one it finds."""
    folder = marian(tmp_path)
    target = read_tokenizer(folder).target
    other = sentencepiece.SentencePieceProcessor(model_file=str(folder / "target.spm"))
    known = [name for name in "kwyWY" if other.piece_to_id(name) == other.unk_id() and target.token_to_id(name)]
    assert known
    for name in known:
        assert ids_of(target, name * 2)[-2:] == [target.token_to_id(name)] * 2


def test_a_piece_that_marians_vocabulary_lacks_is_cut_into_those_it_has(tmp_path):
    folder = marian(tmp_path)
    table = json.loads((folder / "vocab.json").read_text())
    names = [name for name in sorted(table, key=table.get) if name != "▁the"]
    (folder / "vocab.json").write_text(json.dumps({name: index for index, name in enumerate(names)}))
    source = read_tokenizer(folder).source
    assert len(ids_of(source, "the")) > 1
    assert source.decode(ids_of(source, "the")) == "the"


def test_tokenizer_json_comes_first_and_is_not_cut_or_filled_up(tmp_path):
    library = tokenizers.Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "</s>": 2, "a": 3, "b": 4}, "<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<pad>", "<unk>"])
    library.enable_truncation(3)
    library.enable_padding(length=5)
    folder = config(tmp_path, eos_token={"content": "</s>"}, pad_token="<pad>", mask_token="<mask>")
    (folder / "special_tokens_map.json").write_text('{"unk_token": "<unk>", "bos_token": null}')
    (folder / "vocab.txt").write_text("nothing")
    library.save(str(folder / "tokenizer.json"))
    found = read_tokenizer(folder)
    assert found.special == {"eos": 2, "unk": 1, "pad": 0}
    assert found.source is found.target
    assert ids_of(found.source, "a b a b") == [3, 4, 3, 4]
    assert found.source.decode([3, 2]) == "a"
    # A word that is a special token's name is text, and so unknown.
    assert 2 not in ids_of(found.source, "a </s> b")


def test_added_tokens_have_the_ids_that_are_stated(tmp_path):
    folder = config(
        tmp_path,
        tokenizer_class="LlamaTokenizer",
        added_tokens_decoder={"1": {"content": "<s>", "special": True}, "500": {"content": "<new>", "special": True}},
        pad_token="<new>",
    )
    written(folder, trained(**MODELS["bpe"]), "tokenizer.model")
    assert read_tokenizer(folder).special["pad"] == 500
    config(folder, tokenizer_class="LlamaTokenizer")
    (folder / "added_tokens.json").write_text('{"<two>": 501, "<one>": 500}')
    library = read_tokenizer(folder).source
    assert ids_of(library, "<two>") == [501]
    (folder / "added_tokens.json").write_text('{"<two>": 501}')
    with pytest.raises(RegardError, match=r"added_tokens.json: '<two>' should have id 501, and has 500"):
        read_tokenizer(folder)
    (folder / "added_tokens.json").write_text('{"<two>": "many"}')
    with pytest.raises(RegardError, match=r"added_tokens.json: its added tokens cannot be read"):
        read_tokenizer(folder)


WRONG = {
    r"there is no tokenizer. It should hold": {},
    r"tokenizer.json is not a tokenizer": {"tokenizer.json": "{}"},
    r"spiece.model: not a file of sentencepiece": {"spiece.model": "never"},
    r"tokenizer.model: how the class 'gemma' reads it is not known": {
        "tokenizer.model": "",
        "config.json": '{"model_type": "gemma"}',
    },
    r"vocab.json: how the class 'qwen2' reads it is not known": {
        "vocab.json": "{}",
        "tokenizer_config.json": '{"tokenizer_class": "Qwen2TokenizerFast"}',
    },
    r"vocab.txt: there is no \[UNK\]": {"vocab.txt": "a\nb\n"},
    r"vocab.txt: 'a' is there twice": {"vocab.txt": "[UNK]\na\na\n"},
    r"do_lower_case must be true or false \(got 'no'\)": {
        "vocab.txt": "[UNK]\n",
        "tokenizer_config.json": '{"do_lower_case": "no"}',
    },
    r"unk_token = 3 is no name": {"vocab.txt": "[UNK]\n", "special_tokens_map.json": '{"unk_token": 3}'},
    r"tokenizer_config.json: not JSON": {"vocab.txt": "[UNK]\n", "tokenizer_config.json": "{"},
    r"merges.txt: the file is missing": {"vocab.json": '{"a": 0}'},
    r"merges.txt: 'a c' does not fit vocab.json": {
        "vocab.json": '{"a": 0, "b": 1}',
        "merges.txt": "#version: 0.2\na c\n",
    },
    r"vocab.json: its ids are not 0, 1, 2": {"vocab.json": '{"a": 0, "b": 2}', "merges.txt": ""},
    r"target.spm: the file is missing": {
        "source.spm": lambda: trained(**MODELS["unigram"]),
        "vocab.json": '{"</s>": 0, "<unk>": 1, "<pad>": 2}',
    },
    r"source.spm: BPE with ids of another file": {
        "source.spm": lambda: trained(**MODELS["bpe"]),
        "vocab.json": '{"<unk>": 0}',
    },
    r"vocab.json: there is no entry for unknown": {
        "source.spm": lambda: trained(**MODELS["unigram"]),
        "vocab.json": '{"</s>": 0}',
    },
    r"it should begin with <unk>, <s> and </s>": {
        "sentencepiece.bpe.model": lambda: trained(model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    },
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_missing_or_cannot_be_read_is_named(what, tmp_path):
    for name, content in WRONG[what].items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content())
    with pytest.raises(RegardError, match=what) as error:
        read_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)


# -- written ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [TRANSLATING, WRITING, READING], ids=["translating", "writing", "reading"])
@pytest.mark.parametrize("kind", ["word", "char", "bpe", "bytes"])
def test_transformers_gives_the_ids_of_our_own_kinds(kind, special, tmp_path):
    tokenizer = Tokenizer.train(TEXTS, kind, vocab_size=400, mask=special.mask is not None)
    write_tokenizer(tokenizer, tmp_path, special, segments=special is READING, max_len=77)
    texts = [*phrases("test", 20), *ODD, *([] if special is READING else ["<eos> <sos>", "a<unk>"])]
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for other in (fast, transformers.AutoTokenizer.from_pretrained(tmp_path)):
        assert len(other) == tokenizer.vocab_size
        for text in texts:
            ids = tokenizer.encode(text)
            assert other.encode(text, add_special_tokens=False) == ids, text
            assert other(text)["input_ids"] == special.framed(ids), text
            if kind != "char":  # whose accents we put back on their letters
                assert other.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert (fast.pad_token_id, fast.unk_token_id, fast.bos_token_id, fast.eos_token_id) == (0, 1, 2, 3)
    assert (fast.mask_token_id, fast.model_max_length) == (special.mask, 77)
    if special is READING:
        assert fast("<mask>")["input_ids"] == [2, 4, 3]
        pair = fast("the", "cat")
        assert pair["input_ids"] == [2, *tokenizer.encode("the"), EOS, *tokenizer.encode("cat"), EOS]
        assert pair["token_type_ids"] == [0] * (2 + len(tokenizer.encode("the"))) + [1] * (
            1 + len(tokenizer.encode("cat"))
        )
    found = read_tokenizer(tmp_path)
    assert [ids_of(found.source, text) for text in texts] == tokenizer.encode_batch(texts)
    assert found.special["eos"] == 3


@pytest.mark.parametrize("name", ["unigram", "bpe of llama", "bpe defined", "unigram defined"])
def test_transformers_gives_the_ids_of_sentencepiece_tokenizers(name, tmp_path):
    content = trained(**MODELS[name])
    tokenizer = Tokenizer(read_sentencepiece(written(tmp_path, content)), FOREIGN)
    special = Special(pad=2, unk=0, sos=1, eos=2, begin=1)
    write_tokenizer(tokenizer, tmp_path / "folder", special)
    (tmp_path / "folder" / "config.json").write_text('{"model_type": "llama"}')
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    for text in [*SENTENCES, *NAMES]:
        assert other(text)["input_ids"] == [1, *theirs(content).encode(text)], text


def test_two_texts_are_read_as_the_tokenizer_of_roberta_gives_them(tmp_path):
    """From its own files, from tokenizer.json, and after both ways: two separators between the texts."""
    byte_level(tmp_path, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    config(tmp_path, tokenizer_class="RobertaTokenizer")
    other = transformers.RobertaTokenizer.from_pretrained(tmp_path)
    other.save_pretrained(tmp_path / "saved")
    sizes = dict(vocab_size=len(other), hidden_size=24, num_attention_heads=2, num_hidden_layers=1, intermediate_size=9)
    model = transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**sizes, max_position_embeddings=40, type_vocab_size=2, initializer_range=0.5)
    ).eval()
    pairs = [("the cat", "a dog"), ("", "a"), ("The cat sat there.", "☃"), ("the " * 30, "a")]
    for folder in (tmp_path, tmp_path / "saved"):
        model.save_pretrained(folder)
        encoder = import_folder(folder)
        assert encoder.special.between == other.sep_token_id
        export_folder(encoder, folder / "out")
        again = transformers.AutoTokenizer.from_pretrained(folder / "out")
        texts, _ = encode_texts(pairs, encoder.tokenizer, encoder.special, max_len=38, segments=False)
        for number, pair in enumerate(pairs):
            wanted = other(*pair, truncation="longest_first", max_length=38)["input_ids"]
            assert texts.ids[number].tolist() == wanted
            assert again(*pair, truncation="longest_first", max_length=38)["input_ids"] == wanted
        assert "token_type_ids" not in again.model_input_names
        found = encoder.classify(pairs, truncate=True)
        wanted = model(**other(*pairs[0], return_tensors="pt")).logits.softmax(-1)[0].tolist()
        assert list(found[0].probabilities.values()) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("family", ["XLMRoberta", "Camembert"])
def test_relatives_of_roberta_with_pieces_of_sentences(family, tmp_path):
    """As such folders are kept: tokenizer.json with a unigram model, <s> and </s> at ids of their own."""
    library = read_sentencepiece(written(tmp_path, trained(**MODELS["unigram"])))
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
    made = getattr(transformers, f"{family}Config")(**sizes, **ids, intermediate_size=9, max_position_embeddings=200)
    getattr(transformers, f"{family}Model")(made).save_pretrained(tmp_path / "in")
    encoder = import_folder(tmp_path / "in")
    begin, end = first.index("<s>"), first.index("</s>")
    assert encoder.special == Special(
        pad=1, unk=3, sos=begin, eos=end, mask=len(vocab) - 1, begin=begin, end=end, between=end
    )
    export_folder(encoder, tmp_path / "out")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in PLAIN:
        assert encoder.text_ids(text) == other(text)["input_ids"] == again(text)["input_ids"], text
    pair = "the cat", "a dog"
    texts, _ = encode_texts([pair], encoder.tokenizer, encoder.special, max_len=99, segments=False)
    assert texts.ids[0].tolist() == other(*pair)["input_ids"] == again(*pair)["input_ids"]


def test_a_frame_that_is_there_stays(tmp_path):
    """RoBERTa has two separators between the texts of a pair."""
    byte_level(tmp_path, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    config(tmp_path, tokenizer_class="RobertaTokenizer")
    transformers.RobertaTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "first")
    found = read_tokenizer(tmp_path / "first")
    special = Special(pad=1, unk=3, sos=0, eos=2, mask=4, begin=0, end=2)
    write_tokenizer(Tokenizer(found.source, FOREIGN), tmp_path / "second", special)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "second")
    ids = other("the", "cat")["input_ids"]
    assert [one for one in ids if one < 5] == [0, 2, 2, 2]
    assert (other.cls_token, other.sep_token, other.mask_token) == ("<s>", "</s>", "<mask>")


def test_special_ids_that_the_tokenizer_lacks_are_an_error(tmp_path):
    with pytest.raises(RegardError, match="no entry for the mask_token"):
        write_tokenizer(Tokenizer.train(["a"], "word"), tmp_path, Special(mask=99))
    assert not list(tmp_path.iterdir())


def test_several_tokens_around_a_text_are_refused():
    library = build_tokenizer(PieceModel([*SOUND, Piece("</s>", kind=CONTROL), Piece("c", -1, NORMAL)], UNIGRAM), "x")
    library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> <s> $A", special_tokens=[("<s>", 1)])
    library.decoder = decoders.Fuse()
    with pytest.raises(RegardError, match="several tokens around each text"):
        boundary_ids(library)
