"""Import and export of Hugging Face folders: weight files, damaged folders, export of models trained here."""

import dataclasses
import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.interop import export_huggingface, import_huggingface
from regard.layers.packed import pack
from regard.models.bert import Bert, BertConfig
from regard.models.gpt import GPT, GPTConfig
from regard.pipelines import TextEncoder, TextGenerator, load, save
from tests.interop.model_comparison import (
    VOCAB,
    assert_same_weights,
    edit_config,
    random_model,
    weights_of,
    write_tokenizer,
)

TEXTS = ["one two three", "three one", "two two one three two"]


@pytest.fixture
def folder(transformers, tmp_path):
    """The folder of a small BertModel."""
    config = transformers.BertConfig(
        **dict(vocab_size=VOCAB, hidden_size=24, num_attention_heads=2, num_hidden_layers=2, intermediate_size=30),
        max_position_embeddings=12,
    )
    random_model(transformers.BertModel, config, tmp_path / "in")
    return tmp_path / "in"


# -- weight files -----------------------------------------------------------------------------------------------------


def split_weights(folder, stem, ending, write):
    """Splits the weights into two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {}
    for index, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        part = f"{stem}-{index:05}-of-00002.{ending}"
        write({name: tensors[name] for name in names}, folder / part)
        shards |= dict.fromkeys(names, part)
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": shards}))
    return shards


@pytest.mark.parametrize(
    ("stem", "ending", "write"), [("model", "safetensors", save_file), ("pytorch_model", "bin", torch.save)]
)
def test_sharded_weights_are_read(folder, stem, ending, write):
    expected = weights_of(import_huggingface(folder))
    shards = split_weights(folder, stem, ending, write)
    assert_same_weights(weights_of(import_huggingface(folder)), expected)
    (folder / next(iter(shards.values()))).unlink()
    with pytest.raises(RegardError, match=f"-of-00002.{ending}: the file is missing"):
        import_huggingface(folder)


def test_wrong_weight_index_is_an_error(folder):
    shards = split_weights(folder, "model", "safetensors", save_file)
    index = folder / "model.safetensors.index.json"
    name, part = next(iter(shards.items()))
    other = next(shard for shard in shards.values() if shard != part)
    index.write_text(json.dumps({"weight_map": shards | {name: other}}))
    with pytest.raises(RegardError, match=f"{other}: missing tensors: {name}"):
        import_huggingface(folder)
    for invalid in ({}, {"weight_map": {name: "../model.safetensors"}}, {"weight_map": [name]}):
        index.write_text(json.dumps(invalid))
        with pytest.raises(RegardError, match="not a valid weight index"):
            import_huggingface(folder)
    index.write_text(json.dumps({"weight_map": {name: "x" * 300}}))
    with pytest.raises(RegardError, match=r"/x{300}: the file is missing"):
        import_huggingface(folder)


def test_pickled_weights_are_read(folder):
    expected = weights_of(import_huggingface(folder))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_same_weights(weights_of(import_huggingface(folder)), expected)


class MaliciousObject:
    """Creates a folder if it is unpickled without restrictions."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, protocol=2))])
def test_malicious_pickle_is_refused_and_not_executed(folder, tmp_path, write):
    created = tmp_path / "created"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write(tensors | {"more": MaliciousObject(created)}, folder / "pytorch_model.bin")
    with pytest.raises(RegardError, match=r"pytorch_model.bin: the pickle holds more than tensors"):
        import_huggingface(folder)
    assert not created.exists()


def test_pickle_without_a_tensor_dictionary_is_an_error(folder):
    (folder / "model.safetensors").unlink()
    torch.save([torch.zeros(2)], folder / "pytorch_model.bin")
    with pytest.raises(RegardError, match="expected a dictionary of tensors by name"):
        import_huggingface(folder)
    torch.save({"a": torch.zeros(2)}, folder / "pytorch_model.bin")
    content = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    with pytest.raises(RegardError, match=r"pytorch_model.bin: the file is damaged"):
        import_huggingface(folder)


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.5, 0.999])
def test_truncated_safetensors_are_an_error(folder, fraction):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(fraction * len(content))])
    with pytest.raises(RegardError, match=r"model.safetensors: the file is damaged"):
        import_huggingface(folder)


def test_missing_weights_are_an_error(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(RegardError, match="the weights are missing"):
        import_huggingface(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_become_float32(folder, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    weight = weights_of(import_huggingface(folder))["embedding.tokens.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, tensors["embeddings.word_embeddings.weight"].float())


def edit_tensors(folder, **changes):
    """Replaces, adds or removes (None) tensors of the weight file."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def test_missing_and_unknown_tensors_are_listed(folder):
    edit_tensors(folder, pooler__dense__bias=None, embeddings__LayerNorm__bias=None, strange=torch.ones(1))
    with pytest.raises(
        RegardError, match=r"\(missing: embeddings.LayerNorm.bias, pooler.dense.bias; unknown: strange\)"
    ):
        import_huggingface(folder)


def test_tensors_of_the_wrong_shape_are_listed(folder):
    edit_tensors(
        folder,
        pooler__dense__weight=torch.zeros(24, 23),
        encoder__layer__0__attention__self__key__weight=torch.zeros(24, 25),
    )
    with pytest.raises(RegardError) as caught:
        import_huggingface(folder)
    assert "encoder.layer.0.attention.self.key.weight (24, 25)" in str(caught.value)
    assert "pooler.dense.weight (24, 23)" in str(caught.value)


def test_integer_tensors_are_an_error(folder):
    edit_tensors(folder, pooler__dense__weight=torch.zeros(24, 24, dtype=torch.int8))
    with pytest.raises(RegardError, match=r"not floating point: pooler.dense.weight"):
        import_huggingface(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 48, r"wrong shape: embeddings.word_embeddings.weight \(47, 24\)"),
        ("hidden_size", 10**9, r"wrong shape: embeddings.word_embeddings.weight \(47, 24\)"),
        ("vocab_size", 10**12, "config.json: vocab_size must be at most 1,000,000,000"),
        ("intermediate_size", 31, "intermediate.dense.weight"),
        ("max_position_embeddings", 11, "position_embeddings.weight"),
        ("num_hidden_layers", 3, "missing: encoder.layer.2"),
        ("num_hidden_layers", 1, "unknown: encoder.layer.1"),
        ("num_attention_heads", 7, "it must be a multiple of model.heads"),
    ],
)
def test_config_that_contradicts_the_tensors_is_an_error(folder, key, value, message):
    edit_config(folder, **{key: value})
    with pytest.raises(RegardError, match=message):
        import_huggingface(folder)


# -- other files ------------------------------------------------------------------------------------------------------


def test_missing_or_invalid_config_is_an_error(folder, tmp_path):
    with pytest.raises(RegardError, match="the folder does not exist"):
        import_huggingface(tmp_path / "missing")
    with pytest.raises(RegardError, match="the file does not exist"):
        import_huggingface(tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(RegardError, match="not JSON"):
        import_huggingface(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(RegardError, match="not a JSON object"):
        import_huggingface(folder)


@pytest.mark.parametrize("architectures", [[], "BertModel", ["BertModel", "GPT2Model"], ["MambaForCausalLM"]])
def test_unsupported_classes_are_an_error(folder, architectures):
    edit_config(folder, architectures=architectures)
    with pytest.raises(RegardError, match=r"expected a list of one class|unsupported class") as caught:
        import_huggingface(folder)
    assert ("BertModel" if architectures != ["MambaForCausalLM"] else "LlamaForCausalLM") in str(caught.value)
    assert len(str(caught.value)) < 400


def test_model_folder_of_regard_is_not_imported(folder, tmp_path):
    save(tmp_path / "own", import_huggingface(folder))
    with pytest.raises(RegardError, match="already a model folder of Regard"):
        import_huggingface(tmp_path / "own")


def test_missing_tokenizer_can_be_passed(folder):
    tokenizer = import_huggingface(folder).tokenizer
    (folder / "tokenizer.json").unlink()
    with pytest.raises(RegardError, match="the tokenizer is missing"):
        import_huggingface(folder)
    pipeline = import_huggingface(folder, tokenizer=tokenizer)
    assert pipeline.special == SpecialTokens(pad=0, unk=1, sos=2, eos=3, mask=4, begin=2, end=3)
    assert pipeline.tokenizer is tokenizer


def test_tokenizer_larger_than_the_vocabulary_is_an_error(folder):
    write_tokenizer(folder, vocab=VOCAB + 1)
    with pytest.raises(RegardError, match="the tokenizer has 48 entries, but the model has a vocabulary of 47"):
        import_huggingface(folder)
    table = json.loads((folder / "tokenizer.json").read_text())
    table["model"]["vocab"] = {"[UNK]": 1, "w47": 47}  # few entries, but one outside of the vocabulary
    (folder / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(RegardError, match="the tokenizer has 48 entries, but the model has a vocabulary of 47"):
        import_huggingface(folder)
    write_tokenizer(folder, vocab=VOCAB - 1)  # common: embeddings are padded
    assert import_huggingface(folder).tokenizer.vocab_size == 46
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(RegardError, match="is not a tokenizer file"):
        import_huggingface(folder)


def test_vocab_txt_is_read(folder):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "dog", "##s"]
    (folder / "vocab.txt").write_text("\n".join(names) + "\n")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    encoder = import_huggingface(folder)
    assert encoder.special == SpecialTokens(pad=0, unk=1, sos=2, eos=3, mask=4, begin=2, end=3)
    assert encoder.encode_text("Cat, dogs") == [2, 5, 1, 6, 7, 3]


def test_truncation_and_padding_of_the_tokenizer_are_disabled(folder):
    path = folder / "tokenizer.json"
    table = json.loads(path.read_text())
    table["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    table["padding"] = {
        **{"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
    }
    path.write_text(json.dumps(table))
    encoder = import_huggingface(folder)
    assert encoder.encode_text("w5 w6 w7 w8") == [2, 5, 6, 7, 8, 3]
    assert encoder.tokenizer.encode_batch(["w5", "w5 w6 w7 w8"]) == [[5], [5, 6, 7, 8]]


def test_special_ids_of_an_encoder_are_read(folder):
    assert import_huggingface(folder).special == SpecialTokens(pad=0, unk=1, sos=2, eos=3, mask=4, begin=2, end=3)
    # A tokenizer that adds no special tokens: special_tokens_map.json defines them.
    write_tokenizer(folder, add_special_tokens=False)
    (folder / "special_tokens_map.json").write_text(json.dumps({"cls_token": "w7", "sep_token": {"content": "w8"}}))
    assert import_huggingface(folder).special == SpecialTokens(pad=0, unk=1, sos=7, eos=8, mask=4, begin=7, end=8)


def test_imported_model_is_saved_and_loaded(folder, tmp_path):
    """Also if its special ids equal those of models trained with Regard: the tokenizer is an imported one."""
    encoder = import_huggingface(folder)
    save(tmp_path / "own", encoder)
    loaded = load(tmp_path / "own", "cpu")
    assert loaded.special == encoder.special
    assert loaded.encode_text("w5 w9") == encoder.encode_text("w5 w9")
    assert_same_weights(weights_of(loaded), weights_of(encoder))


# -- export of models of Regard ---------------------------------------------------------------------------------------


def make_encoder(**changes):
    torch.manual_seed(5)
    tokenizer = Tokenizer.train(TEXTS, "word", mask=True)
    config = BertConfig(width=24, heads=3, layers=2, feedforward=40, max_len=12, vocab=tokenizer.vocab_size)
    return TextEncoder(Bert(dataclasses.replace(config, **changes)).eval(), tokenizer)


def make_language_model(**changes):
    torch.manual_seed(5)
    tokenizer = Tokenizer.train(TEXTS, "word")
    config = GPTConfig(
        **dict(width=24, heads=4, layers=2, feedforward=40, max_len=12, vocab=tokenizer.vocab_size),
        **dict(activation="swiglu", qk_norm=False),
    )
    return TextGenerator(GPT(dataclasses.replace(config, **changes)).eval(), tokenizer)


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
LANGUAGE_MODELS = [
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"bias": "all", "kv_heads": 2, "rotary_base": 700.0, "tied": False}),
    ("Qwen2ForCausalLM", {"bias": "qkv"}),
    ("Qwen3ForCausalLM", {"qk_norm": True, "head_width": 10}),
    (
        "GPT2LMHeadModel",
        {"norm_kind": "layer", "positions": "learned", "bias": "all", "activation": "relu2", "score": "dot"},
    ),
]


def unbatch(output):
    """The output of transformers for one text, in the shape of Regard's."""
    if "start_logits" in output:
        return torch.stack([output.start_logits[0], output.end_logits[0]], dim=1)
    if "last_hidden_state" in output:
        return output.last_hidden_state[0]
    return output.logits if output.logits.dim() == 2 else output.logits[0]


@pytest.mark.parametrize(
    ("name", "make", "changes"),
    [(name, make_encoder, changes) for name, changes in ENCODERS]
    + [(name, make_language_model, changes) for name, changes in LANGUAGE_MODELS],
)
def test_exported_model_gives_the_same_output_in_transformers(transformers, tmp_path, name, make, changes):
    pipeline = make(**changes)
    assert export_huggingface(pipeline, tmp_path / "out") == name
    hf_model, report = getattr(transformers, name).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    # AutoTokenizer replaces the tokenizer of every Qwen2 folder.
    tokenizer_class = transformers.PreTrainedTokenizerFast if "Qwen2" in name else transformers.AutoTokenizer
    tokenizer = tokenizer_class.from_pretrained(tmp_path / "out")
    ids = pipeline.special.add_special_tokens(pipeline.tokenizer.encode(TEXTS[2]))
    inputs = tokenizer(TEXTS[2], return_tensors="pt")
    assert inputs["input_ids"].tolist() == [ids]
    with torch.no_grad():
        expected = unbatch(hf_model.eval()(**inputs))
        torch.testing.assert_close(pipeline.model(pack([ids])), expected, atol=1e-4, rtol=0)
    imported = import_huggingface(tmp_path / "out")
    assert_same_weights(weights_of(imported), weights_of(pipeline))
    assert imported.special == pipeline.special
    assert imported.model.config.labels == pipeline.model.config.labels if make is make_encoder else True


def test_exported_tokenizer_encodes_pairs_and_special_names(transformers, tmp_path):
    pipeline = make_encoder()
    export_huggingface(pipeline, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("one", "two three").data == {
        "input_ids": [2, *pipeline.tokenizer.encode("one"), 3, *pipeline.tokenizer.encode("two three"), 3],
        "token_type_ids": [0, 0, 0, 1, 1, 1],
        "attention_mask": [1] * 6,
    }
    # <mask> in a text is a mask for masked language models; other models encode special names as text.
    assert tokenizer("one <mask>")["input_ids"] == [2, *pipeline.tokenizer.encode("one"), 4, 3]
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id) == (0, 1, 4)
    assert tokenizer.model_max_length == 12
    for other in (make_language_model(), make_encoder(head="classify", pooler="tanh", labels=("a", "b"))):
        folder = tmp_path / type(other).__name__
        export_huggingface(other, folder)
        ids = transformers.AutoTokenizer.from_pretrained(folder)("one <mask><eos>")["input_ids"]
        assert ids == other.special.add_special_tokens(other.tokenizer.encode("one <mask><eos>"))


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (
            make_language_model,
            {"activation": "relu2"},
            r"LlamaForCausalLM, does not support activation = 'relu2' \(supported: 'swiglu'\)",
        ),
        (make_language_model, {"score": "cosine"}, "score = 'cosine'"),
        (make_language_model, {"positions": "none"}, "positions = 'none'"),
        (make_language_model, {"bias": "qkv", "qk_norm": True}, "qk_norm = True|bias = 'qkv'"),
        (make_language_model, {"width": 25, "head_width": 6}, "heads"),
        (make_encoder, {"score": "general"}, "score = 'general'"),
        (make_encoder, {"norm": "pre"}, "norm = 'pre'"),
        (make_encoder, {"qk_norm": True}, "qk_norm = True"),
        (make_encoder, {"positions": "rotary"}, "positions = 'rotary'"),
        (make_encoder, {"groups": 1}, "groups = 1|embedding_width = 0"),
        (make_encoder, {"segments": 0, "norm_eps": 1e-5}, "norm_eps = 1e-05|segments = 0"),
        (make_encoder, {"head": "none"}, "pooler = 'none'"),
        (make_encoder, {"position_offset": 2}, r"position_offset = 2 must be one more than the padding id \(0\)"),
        (make_encoder, {"position_offset": 1, "activation": "relu"}, "position_offset = 1|activation = 'relu'"),
    ],
)
def test_unsupported_fields_are_named_and_nothing_is_written(tmp_path, make, changes, message):
    with pytest.raises(RegardError, match=message):
        export_huggingface(make(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_family_without_a_class_is_an_error(seq2seq, tmp_path):
    with pytest.raises(RegardError, match="transformers has no class for models of the family seq2seq"):
        export_huggingface(seq2seq, tmp_path / "out")


def test_unused_pooler_is_left_out(tmp_path, caplog):
    """As after fine-tuning from a model with a pooler and labels."""
    pipeline = make_encoder(head="answer", pooler="tanh", labels=("a", "b", "c"))
    assert export_huggingface(pipeline, tmp_path / "out") == "BertForQuestionAnswering"
    assert "pooler.weight" in caplog.text
    assert "bert.pooler.dense.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_existing_model_is_not_overwritten(folder):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(RegardError, match="already contains a model"):
        export_huggingface(make_encoder(), folder)
    assert (folder / "model.safetensors").read_bytes() == before
