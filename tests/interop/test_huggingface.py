"""Folders of Hugging Face: what is in them, in whatever state, and what is written."""

import dataclasses
import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.data.special import Special
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.folder import LanguageModel, TextEncoder, load, save
from regard.interop import export_folder, import_folder
from regard.layers.packed import pack
from regard.models.bert import Bert, BertConfig
from regard.models.gpt import GPT, GPTConfig
from tests.interop.comparing import (
    VOCAB,
    random_model,
    write_tokenizer,
)

TEXTS = ["one two three", "three one", "two two one three two"]


@pytest.fixture
def folder(transformers, tmp_path):
    """A small BertModel."""
    config = transformers.BertConfig(
        **dict(vocab_size=VOCAB, hidden_size=24, num_attention_heads=2, num_hidden_layers=2, intermediate_size=30),
        max_position_embeddings=12,
    )
    random_model(transformers.BertModel, config, tmp_path / "in")
    return tmp_path / "in"


def weights_of(bundle):
    return {name: parameter.detach() for name, parameter in bundle.model.named_parameters()}


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def edited(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# -- files of weights ------------------------------------------------------------------------------------------------


def in_parts(folder, stem, ending, write):
    """The weights in two files, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        part = f"{stem}-{number:05}-of-00002.{ending}"
        write({name: tensors[name] for name in names}, folder / part)
        places |= dict.fromkeys(names, part)
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": places}))
    return places


@pytest.mark.parametrize(
    ("stem", "ending", "write"), [("model", "safetensors", save_file), ("pytorch_model", "bin", torch.save)]
)
def test_weights_in_several_files(folder, stem, ending, write):
    whole = weights_of(import_folder(folder))
    places = in_parts(folder, stem, ending, write)
    same(weights_of(import_folder(folder)), whole)
    (folder / next(iter(places.values()))).unlink()
    with pytest.raises(RegardError, match=f"-of-00002.{ending}: the file is missing"):
        import_folder(folder)


def test_an_index_that_is_wrong(folder):
    places = in_parts(folder, "model", "safetensors", save_file)
    index = folder / "model.safetensors.index.json"
    name, part = next(iter(places.items()))
    other = next(one for one in places.values() if one != part)
    index.write_text(json.dumps({"weight_map": places | {name: other}}))
    with pytest.raises(RegardError, match=f"{other}: there is no {name}"):
        import_folder(folder)
    for wrong in ({}, {"weight_map": {name: "../model.safetensors"}}, {"weight_map": [name]}):
        index.write_text(json.dumps(wrong))
        with pytest.raises(RegardError, match="not an index of weights"):
            import_folder(folder)


def test_weights_in_a_pickle(folder):
    whole = weights_of(import_folder(folder))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    same(weights_of(import_folder(folder)), whole)


class Malice:
    """Unpickled without care, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("write", [torch.save, lambda what, path: path.write_bytes(pickle.dumps(what, protocol=2))])
def test_a_pickle_that_would_run_something(folder, tmp_path, write):
    made = tmp_path / "made"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write(tensors | {"more": Malice(made)}, folder / "pytorch_model.bin")
    with pytest.raises(RegardError, match=r"pytorch_model.bin: a pickle that holds more than tensors"):
        import_folder(folder)
    assert not made.exists()


def test_a_pickle_of_something_else(folder):
    (folder / "model.safetensors").unlink()
    torch.save([torch.zeros(2)], folder / "pytorch_model.bin")
    with pytest.raises(RegardError, match="something else than tensors by name"):
        import_folder(folder)
    torch.save({"a": torch.zeros(2)}, folder / "pytorch_model.bin")
    content = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    with pytest.raises(RegardError, match=r"pytorch_model.bin: damaged"):
        import_folder(folder)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999])
def test_truncated_safetensors(folder, part):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(RegardError, match=r"model.safetensors: damaged"):
        import_folder(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(RegardError, match="the weights are missing"):
        import_folder(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(folder, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    found = weights_of(import_folder(folder))["embedding.tokens.weight"]
    assert found.dtype == torch.float32
    assert torch.equal(found, tensors["embeddings.word_embeddings.weight"].float())


def changed(folder, **changes):
    """The weights with some replaced, added, or taken away (None)."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: one for name, one in tensors.items() if one is not None}, folder / "model.safetensors")


def test_all_that_is_wrong_is_listed(folder):
    changed(folder, pooler__dense__bias=None, embeddings__LayerNorm__bias=None, strange=torch.ones(1))
    with pytest.raises(
        RegardError, match=r"\(missing: embeddings.LayerNorm.bias, pooler.dense.bias; unknown: strange\)"
    ):
        import_folder(folder)


def test_shapes_are_listed_by_their_names(folder):
    changed(
        folder,
        pooler__dense__weight=torch.zeros(24, 23),
        encoder__layer__0__attention__self__key__weight=torch.zeros(24, 25),
    )
    with pytest.raises(RegardError) as caught:
        import_folder(folder)
    assert "encoder.layer.0.attention.self.key.weight (24, 25)" in str(caught.value)
    assert "pooler.dense.weight (24, 23)" in str(caught.value)


def test_whole_numbers_are_no_weights(folder):
    changed(folder, pooler__dense__weight=torch.zeros(24, 24, dtype=torch.int8))
    with pytest.raises(RegardError, match=r"not of floating point: pooler.dense.weight"):
        import_folder(folder)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_size", 48, r"of another shape: embeddings.word_embeddings.weight \(47, 24\)"),
        ("hidden_size", 10**9, r"of another shape: embeddings.word_embeddings.weight \(47, 24\)"),
        ("vocab_size", 10**12, "config.json: vocab_size must be at most 1,000,000,000"),
        ("intermediate_size", 31, "intermediate.dense.weight"),
        ("max_position_embeddings", 11, "position_embeddings.weight"),
        ("num_hidden_layers", 3, "missing: encoder.layer.2"),
        ("num_hidden_layers", 1, "unknown: encoder.layer.1"),
        ("num_attention_heads", 7, "it must be a multiple of model.heads"),
    ],
)
def test_a_config_that_lies(folder, key, value, said):
    edited(folder, **{key: value})
    with pytest.raises(RegardError, match=said):
        import_folder(folder)


# -- other files -----------------------------------------------------------------------------------------------------


def test_folders_that_are_none(folder, tmp_path):
    with pytest.raises(RegardError, match="there is no such folder"):
        import_folder(tmp_path / "nowhere")
    with pytest.raises(RegardError, match="there is no such file"):
        import_folder(tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(RegardError, match="not JSON"):
        import_folder(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(RegardError, match="not a JSON object"):
        import_folder(folder)


@pytest.mark.parametrize("stated", [None, [], "BertModel", ["BertModel", "GPT2Model"], ["MambaForCausalLM"]])
def test_classes_that_are_not_known(folder, stated):
    edited(folder, architectures=stated)
    with pytest.raises(RegardError, match=r"names no class|is not known") as caught:
        import_folder(folder)
    assert "LlamaForCausalLM" in str(caught.value)


def test_a_folder_of_our_own(folder, tmp_path):
    save(tmp_path / "own", import_folder(folder))
    with pytest.raises(RegardError, match="already a model folder of Regard"):
        import_folder(tmp_path / "own")


def test_a_folder_without_a_tokenizer(folder):
    own = import_folder(folder).tokenizer
    (folder / "tokenizer.json").unlink()
    with pytest.raises(RegardError, match="there is no tokeniser"):
        import_folder(folder)
    bundle = import_folder(folder, tokenizer=own)
    assert bundle.special == Special(pad=0, unk=1, sos=2, eos=3, mask=4, begin=2, end=3)
    assert bundle.tokenizer is own


def test_a_tokenizer_that_does_not_fit(folder):
    write_tokenizer(folder, vocab=VOCAB + 1)
    with pytest.raises(RegardError, match="a tokeniser of 48 entries, but the model knows 47"):
        import_folder(folder)
    table = json.loads((folder / "tokenizer.json").read_text())
    table["model"]["vocab"] = {"[UNK]": 1, "w47": 47}  # few entries, but one of them beyond
    (folder / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(RegardError, match="a tokeniser of 48 entries, but the model knows 47"):
        import_folder(folder)
    write_tokenizer(folder, vocab=VOCAB - 1)  # which is common: embeddings are rounded up
    assert import_folder(folder).tokenizer.vocab_size == 46
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(RegardError, match="is not a tokenizer file"):
        import_folder(folder)


def test_a_tokenizer_in_another_file(folder):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "dog", "##s"]
    (folder / "vocab.txt").write_text("\n".join(names) + "\n")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    encoder = import_folder(folder)
    assert encoder.special == Special(pad=0, unk=1, sos=2, eos=3, mask=4, begin=2, end=3)
    assert encoder.text_ids("Cat, dogs") == [2, 5, 1, 6, 7, 3]


def test_texts_are_neither_cut_nor_filled_up(folder):
    path = folder / "tokenizer.json"
    table = json.loads(path.read_text())
    table["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    table["padding"] = {
        **{"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
    }
    path.write_text(json.dumps(table))
    encoder = import_folder(folder)
    assert encoder.text_ids("w5 w6 w7 w8") == [2, 5, 6, 7, 8, 3]
    assert encoder.tokenizer.encode_batch(["w5", "w5 w6 w7 w8"]) == [[5], [5, 6, 7, 8]]


def test_special_ids_of_an_encoder(folder):
    assert import_folder(folder).special == Special(pad=0, unk=1, sos=2, eos=3, mask=4, begin=2, end=3)
    # A tokeniser that frames nothing: the files say what begins a text and what ends it.
    write_tokenizer(folder, framed=False)
    (folder / "special_tokens_map.json").write_text(json.dumps({"cls_token": "w7", "sep_token": {"content": "w8"}}))
    assert import_folder(folder).special == Special(pad=0, unk=1, sos=7, eos=8, mask=4, begin=7, end=8)


def test_saved_as_our_own_folder(folder, tmp_path):
    """Even where its special ids are those of models trained here: the tokeniser is another program's."""
    encoder = import_folder(folder)
    save(tmp_path / "own", encoder)
    again = load(tmp_path / "own", "cpu")
    assert again.special == encoder.special
    assert again.text_ids("w5 w9") == encoder.text_ids("w5 w9")
    same(weights_of(again), weights_of(encoder))


# -- models of ours --------------------------------------------------------------------------------------------------


def own_encoder(**changes):
    torch.manual_seed(5)
    tokenizer = Tokenizer.train(TEXTS, "word", mask=True)
    config = BertConfig(width=24, heads=3, layers=2, feedforward=40, max_len=12, vocab=tokenizer.vocab_size)
    return TextEncoder(Bert(dataclasses.replace(config, **changes)).eval(), tokenizer)


def own_writer(**changes):
    torch.manual_seed(5)
    tokenizer = Tokenizer.train(TEXTS, "word")
    config = GPTConfig(
        **dict(width=24, heads=4, layers=2, feedforward=40, max_len=12, vocab=tokenizer.vocab_size),
        **dict(activation="swiglu", qk_norm=False),
    )
    return LanguageModel(GPT(dataclasses.replace(config, **changes)).eval(), tokenizer)


ENCODERS = [
    ("BertForMaskedLM", {}),
    ("BertModel", {"head": "none", "pooler": "tanh"}),
    ("BertForSequenceClassification", {"head": "classify", "pooler": "tanh", "labels": ("a", "b", "c")}),
    ("BertForQuestionAnswering", {"head": "answer", "activation": "relu2", "norm_eps": 1e-5}),
    ("RobertaForMaskedLM", {"position_offset": 1, "segments": 1}),
    ("DistilBertForMaskedLM", {"segments": 0}),
    (
        "DistilBertForSequenceClassification",
        {"segments": 0, "head": "classify", "pooler": "relu", "labels": ("a", "b")},
    ),
    ("AlbertForMaskedLM", {"embedding_width": 10, "groups": 1}),
    ("AlbertForQuestionAnswering", {"embedding_width": 10, "head": "answer"}),
]
WRITERS = [
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"bias": "all", "kv_heads": 2, "rotary_base": 700.0, "tied": False}),
    ("Qwen2ForCausalLM", {"bias": "qkv"}),
    ("Qwen3ForCausalLM", {"qk_norm": True, "head_width": 10}),
    (
        "GPT2LMHeadModel",
        {"norm_kind": "layer", "positions": "learned", "bias": "all", "activation": "relu2", "score": "dot"},
    ),
]


def output_of(found):
    """What a model of theirs says of one text, as ours says it."""
    if "start_logits" in found:
        return torch.stack([found.start_logits[0], found.end_logits[0]], dim=1)
    if "last_hidden_state" in found:
        return found.last_hidden_state[0]
    return found.logits if found.logits.dim() == 2 else found.logits[0]


@pytest.mark.parametrize(
    ("name", "make", "changes"),
    [(name, own_encoder, changes) for name, changes in ENCODERS]
    + [(name, own_writer, changes) for name, changes in WRITERS],
)
def test_models_of_ours(transformers, tmp_path, name, make, changes):
    bundle = make(**changes)
    assert export_folder(bundle, tmp_path / "out") == name
    theirs, report = getattr(transformers, name).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    # AutoTokenizer makes a Qwen2 tokeniser of its own out of any folder of that family.
    opener = transformers.PreTrainedTokenizerFast if "Qwen2" in name else transformers.AutoTokenizer
    tokenizer = opener.from_pretrained(tmp_path / "out")
    ids = bundle.special.framed(bundle.tokenizer.encode(TEXTS[2]))
    given = tokenizer(TEXTS[2], return_tensors="pt")
    assert given["input_ids"].tolist() == [ids]
    with torch.no_grad():
        found = output_of(theirs.eval()(**given))
        torch.testing.assert_close(bundle.model(pack([ids])), found, atol=1e-4, rtol=0)
    again = import_folder(tmp_path / "out")
    same(weights_of(again), weights_of(bundle))
    assert again.special == bundle.special
    assert again.model.config.labels == bundle.model.config.labels if make is own_encoder else True


def test_two_texts_and_special_names_in_them(transformers, tmp_path):
    bundle = own_encoder()
    export_folder(bundle, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("one", "two three").data == {
        "input_ids": [2, *bundle.tokenizer.encode("one"), 3, *bundle.tokenizer.encode("two three"), 3],
        "token_type_ids": [0, 0, 0, 1, 1, 1],
        "attention_mask": [1] * 6,
    }
    # What is hidden can be marked in a text there; where nothing is to be hidden, names of special tokens are text.
    assert tokenizer("one <mask>")["input_ids"] == [2, *bundle.tokenizer.encode("one"), 4, 3]
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id) == (0, 1, 4)
    assert tokenizer.model_max_length == 12
    export_folder(own_writer(), tmp_path / "writer")
    writer = transformers.AutoTokenizer.from_pretrained(tmp_path / "writer")
    assert writer("<eos>")["input_ids"] == own_writer().prompt_ids("<eos>") != [2, 3]


@pytest.mark.parametrize(
    ("make", "changes", "said"),
    [
        (own_writer, {"activation": "relu2"}, r"LlamaForCausalLM, differs in activation = 'relu2' \(there: 'swiglu'\)"),
        (own_writer, {"score": "cosine"}, "score = 'cosine'"),
        (own_writer, {"positions": "none"}, "positions = 'none'"),
        (own_writer, {"bias": "qkv", "qk_norm": True}, "qk_norm = True|bias = 'qkv'"),
        (own_writer, {"width": 25, "head_width": 6}, "heads"),
        (own_encoder, {"score": "general"}, "score = 'general'"),
        (own_encoder, {"norm": "pre"}, "norm = 'pre'"),
        (own_encoder, {"qk_norm": True}, "qk_norm = True"),
        (own_encoder, {"positions": "rotary"}, "positions = 'rotary'"),
        (own_encoder, {"groups": 1}, "groups = 1|embedding_width = 0"),
        (own_encoder, {"segments": 0, "norm_eps": 1e-5}, "norm_eps = 1e-05|segments = 0"),
        (own_encoder, {"head": "none"}, "pooler = 'none'"),
        (own_encoder, {"position_offset": 2}, "position_offset = 2 is not one more than that id, 0"),
        (own_encoder, {"position_offset": 1, "activation": "relu"}, "position_offset = 1|activation = 'relu'"),
    ],
)
def test_what_no_class_computes_is_named_and_nothing_is_written(tmp_path, make, changes, said):
    with pytest.raises(RegardError, match=said):
        export_folder(make(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_translators_have_no_class_yet_but_say_so(seq2seq, tmp_path):
    with pytest.raises(RegardError, match="No class of transformers is a seq2seq"):
        export_folder(seq2seq, tmp_path / "out")


def test_a_pooler_that_no_output_passes_through_is_left_out(tmp_path, caplog):
    """As after fine-tuning from a model that had one, and labels."""
    bundle = own_encoder(head="answer", pooler="tanh", labels=("a", "b", "c"))
    assert export_folder(bundle, tmp_path / "out") == "BertForQuestionAnswering"
    assert "pooler.weight" in caplog.text
    assert "bert.pooler.dense.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_a_model_is_not_written_over_another(folder):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(RegardError, match="there is a model already"):
        export_folder(own_encoder(), folder)
    assert (folder / "model.safetensors").read_bytes() == before
