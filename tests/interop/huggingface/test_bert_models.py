"""BERT and its relatives, beside transformers with random weights."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.errors import RegardError
from regard.interop import import_folder
from regard.layers.packed import pack
from tests.interop.comparing import (
    ROWS,
    VOCAB,
    compare_attention,
    random_model,
    real,
    round_trip,
    run_theirs,
)

SEGMENTS = [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1]]

_SIZES = {"vocab_size": VOCAB, "hidden_size": 30, "num_attention_heads": 5, "num_hidden_layers": 2}
CONFIGS = {
    "Bert": [
        dict(_SIZES, intermediate_size=37, max_position_embeddings=13),
        dict(
            **dict(_SIZES, hidden_size=24, num_attention_heads=1, num_hidden_layers=3, hidden_act="gelu_new"),
            **dict(intermediate_size=50, max_position_embeddings=20, layer_norm_eps=1e-3, type_vocab_size=3),
        ),
    ],
    "Roberta": [
        dict(_SIZES, intermediate_size=37, max_position_embeddings=13, type_vocab_size=2, pad_token_id=1),
        dict(
            **dict(_SIZES, hidden_size=24, num_attention_heads=3, num_hidden_layers=3, intermediate_size=41),
            **dict(max_position_embeddings=20, layer_norm_eps=1e-5, type_vocab_size=2, pad_token_id=4),
        ),
    ],
    "XLMRoberta": [
        dict(_SIZES, intermediate_size=37, max_position_embeddings=13, type_vocab_size=1, layer_norm_eps=1e-5),
    ],
    "Camembert": [
        dict(_SIZES, hidden_size=25, intermediate_size=41, max_position_embeddings=20, type_vocab_size=1),
    ],
    "DistilBert": [
        dict(vocab_size=VOCAB, dim=30, n_heads=5, n_layers=2, hidden_dim=37, max_position_embeddings=13),
        dict(
            **dict(vocab_size=VOCAB, dim=24, n_heads=3, n_layers=3, hidden_dim=50, max_position_embeddings=20),
            **dict(activation="relu", sinusoidal_pos_embds=True),
        ),
    ],
    "Albert": [
        dict(_SIZES, intermediate_size=37, max_position_embeddings=13, embedding_size=11),
        dict(
            **dict(_SIZES, num_hidden_layers=4, num_hidden_groups=2, hidden_act="gelu", intermediate_size=50),
            **dict(max_position_embeddings=20, embedding_size=30, layer_norm_eps=1e-5),
        ),
    ],
}
CASES = [(family, i) for family, configs in CONFIGS.items() for i in range(len(configs))]


def made(transformers, family, number, head, folder, **changes):
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family][number] | changes)
    return random_model(getattr(transformers, f"{family}{head}"), config, folder)


def segments_of(family):
    return None if family in ("XLMRoberta", "Camembert", "DistilBert") else SEGMENTS


def output_of(family, model):
    return run_theirs(model, segments_of(family), pad=model.config.pad_token_id)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "number"), CASES)
def test_the_encoder(transformers, tmp_path, family, number):
    theirs = made(transformers, family, number, "Model", tmp_path / "in")
    wanted = output_of(family, theirs)
    bundle, again = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    encoded = compare_attention(bundle.model, wanted.attentions, segments_of(family))
    close(encoded, real(wanted.last_hidden_state))
    if family != "DistilBert":
        close(bundle.model.pooled(encoded, pack(ROWS)), wanted.pooler_output)
    assert torch.equal(output_of(family, again).last_hidden_state, wanted.last_hidden_state)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "Albert"])
def test_the_encoder_without_a_pooler(transformers, tmp_path, family):
    theirs = made(transformers, family, 0, "Model", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if "pooler" not in name}, tmp_path / "model.safetensors")
    bundle = import_folder(tmp_path)
    assert bundle.model.config.pooler == "none"
    wanted = output_of(family, theirs)
    close(compare_attention(bundle.model, wanted.attentions, SEGMENTS), real(wanted.last_hidden_state))


@pytest.mark.parametrize(("family", "number"), CASES)
def test_naming_masked_tokens(transformers, tmp_path, family, number):
    theirs = made(transformers, family, number, "ForMaskedLM", tmp_path / "in")
    wanted = output_of(family, theirs)
    bundle, again = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    close(compare_attention(bundle.model, wanted.attentions, segments_of(family)), real(wanted.logits))
    assert torch.equal(output_of(family, again).logits, wanted.logits)


@pytest.mark.parametrize(("family", "number"), CASES)
def test_classifying(transformers, tmp_path, family, number):
    names = {0: "bad", 1: "so so", 2: "good"}
    theirs = made(transformers, family, number, "ForSequenceClassification", tmp_path / "in", id2label=names)
    wanted = output_of(family, theirs)
    bundle, again = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    assert bundle.model.config.labels == ("bad", "so so", "good")
    close(compare_attention(bundle.model, wanted.attentions, segments_of(family)), wanted.logits)
    assert torch.equal(output_of(family, again).logits, wanted.logits)
    assert again.config.id2label == names


@pytest.mark.parametrize(("family", "number"), CASES)
def test_answering(transformers, tmp_path, family, number):
    theirs = made(transformers, family, number, "ForQuestionAnswering", tmp_path / "in")
    wanted = output_of(family, theirs)
    bundle, again = round_trip(transformers, tmp_path / "in", tmp_path / "out")
    logits = compare_attention(bundle.model, wanted.attentions, segments_of(family))
    close(logits, torch.stack([real(wanted.start_logits), real(wanted.end_logits)], dim=1))
    assert torch.equal(output_of(family, again).end_logits, wanted.end_logits)


@pytest.mark.parametrize("family", ["Bert", "Albert"])
def test_of_pre_training_the_masked_half(transformers, tmp_path, caplog, family):
    theirs = made(transformers, family, 0, "ForPreTraining", tmp_path)
    with caplog.at_level(logging.WARNING, "regard"):
        bundle = import_folder(tmp_path)
    assert "pooler" in caplog.text  # what is left out is said
    segments = torch.tensor([one for row in SEGMENTS for one in row])
    close(bundle.model(pack(ROWS), segments), real(output_of(family, theirs).prediction_logits))


def test_labels_without_names(transformers, tmp_path):
    made(transformers, "Bert", 0, "ForSequenceClassification", tmp_path)
    assert import_folder(tmp_path).model.config.labels == ("LABEL_0", "LABEL_1")


def renamed(folder, rename):
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return tensors


def test_names_of_the_first_years(transformers, tmp_path):
    """gamma and beta, a decoder beside the embedding that it is, and numbers of positions."""
    theirs = made(transformers, "Bert", 0, "ForMaskedLM", tmp_path)
    tensors = renamed(
        tmp_path, lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta")
    )
    old = load_file(tmp_path / "model.safetensors") | {
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].clone(),
        "bert.embeddings.position_ids": torch.arange(13)[None],
    }
    assert "bert.embeddings.LayerNorm.gamma" in old
    save_file(old, tmp_path / "model.safetensors")
    close(import_folder(tmp_path).model(pack(ROWS)), real(run_theirs(theirs).logits))


def test_a_decoder_that_is_not_the_embedding_is_refused(transformers, tmp_path):
    made(transformers, "Bert", 0, "ForMaskedLM", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RegardError, match=r"copy of: cls.predictions.decoder.weight"):
        import_folder(tmp_path)


@pytest.mark.parametrize("head", ["Model", "ForQuestionAnswering"])
def test_with_the_prefix_and_without(transformers, tmp_path, head):
    made(transformers, "Bert", 0, head, tmp_path)
    before = dict(import_folder(tmp_path).model.named_parameters())
    renamed(tmp_path, lambda name: name.removeprefix("bert.") if head != "Model" else f"bert.{name}")
    after = dict(import_folder(tmp_path).model.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("Bert", "position_embedding_type", "relative_key"),
        ("Bert", "is_decoder", True),
        ("Bert", "add_cross_attention", True),
        ("Bert", "tie_word_embeddings", False),
        ("Bert", "hidden_act", "gelu_10"),
        ("Bert", "pruned_heads", {"0": [1]}),
        ("Bert", "hidden_size", "30"),
        ("Bert", "num_attention_heads", 0),
        ("Bert", "quantization_config", {"bits": 4}),
        ("Bert", "auto_map", {"AutoModel": "own.Model"}),
        ("Roberta", "hidden_act", "relu"),
        ("Roberta", "max_position_embeddings", 2),
        ("DistilBert", "activation", "tanh"),
        ("Albert", "inner_group_num", 2),
    ],
)
def test_what_changes_the_computation_is_refused_by_its_key(transformers, tmp_path, family, key, value):
    made(transformers, family, 0, "ForMaskedLM", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(RegardError, match=key):
        import_folder(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("id2label", {"1": "a", "2": "b"}), ("problem_type", "multi_label_classification")]
)
def test_labels_must_be_numbered_and_of_one_text_one(transformers, tmp_path, key, value):
    made(transformers, "Bert", 0, "ForSequenceClassification", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(RegardError, match=key):
        import_folder(tmp_path)
